"""How long does an all-reduce of 64 MiB between 2 ranks of one host take, against DeepSpeed's through shared memory?

Each side is 2 processes of one thread each, which live through the whole run; the sides take turns. Ours is
``Collectives.all_reduce`` of an engine's buffer (in memory that the ranks share) and of other memory, theirs
``deepspeed.comm.inference_all_reduce`` with DeepSpeed's shared-memory operator. Both sides have to give the same sums.
DSC_PEER_PYTHON names the interpreter of an environment with DeepSpeed and the same torch.
Run: python -m benchmarks.deepspeed_c.all_reduce_to_deepspeed [--rounds 15] [--mib 64]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.served import ServedRanks, say

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
WARMUP, CALLS = 3, 3
SKIPPED = 77
OURS, OURS_ELSEWHERE, THEIRS = "ours", "ours, of other memory", "deepspeed"


def all_reduce_of(contender: str, n_bytes: int, dtype: str) -> tuple[Any, Callable[[], None]]:
    """A tensor, and the call that sums it over the ranks."""
    import torch

    if contender == THEIRS:
        import deepspeed

        deepspeed.init_distributed("gloo")
        if deepspeed.comm.comm.cdb.shm_comm_op is None:
            raise SystemExit("DeepSpeed has no operator for shared memory here")
        tensor = torch.empty(n_bytes, dtype=torch.uint8).view(getattr(torch, dtype))
        return tensor, lambda: deepspeed.comm.inference_all_reduce(tensor)
    import deepspeed_c
    from deepspeed_c.comm.collectives import Collectives

    deepspeed_c.init_distributed("gloo")
    comm = Collectives()
    comm.use_shared_memory("shm")
    allocate = comm.allocate if contender == OURS else Collectives().allocate
    tensor = allocate(n_bytes, torch.device("cpu")).view(getattr(torch, dtype))
    transport = comm.transport_of(tensor)
    if transport.name != "shm" or transport.owns(tensor) != (contender == OURS):
        raise SystemExit(f"{contender}: the tensor goes over {transport.name} from the wrong memory")
    return tensor, lambda: comm.all_reduce(tensor).wait()


def serve(contender: str, n_bytes: int, dtype: str) -> None:
    """One rank of a contender: seconds a call for each line of standard input."""
    import torch

    torch.set_num_threads(1)
    tensor, call = all_reduce_of(contender, n_bytes, dtype)

    def fill() -> None:
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.int32).remainder_(97).add_(int(os.environ["RANK"])))

    fill()
    call()
    total = tensor.double().sum().item()
    for _ in range(WARMUP):
        call()
    say({"sum": total, "torch": torch.__version__})
    for _ in sys.stdin:
        fill()
        call()  # after which both ranks are here
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        say({"seconds": (time.perf_counter() - begin) / CALLS})
    sys.stdout.flush()
    os._exit(0)


def side(contender: str, python: str, n_bytes: int, dtype: str, extensions: str) -> ServedRanks:
    """The ranks of a contender."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions}
    environment |= {"OMP_NUM_THREADS": "1", "DSC_NUM_THREADS": "1", "LOCAL_SIZE": str(RANKS)}
    environment["PYTHONPATH"] = str(ROOT)
    if contender == THEIRS:  # ninja is found beside its interpreter
        environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"
    command = [python, str(Path(__file__).resolve()), "--serve", contender, "--bytes", str(n_bytes), "--dtype", dtype]
    from tests.ranks import free_port

    return ServedRanks(command, environment, RANKS, free_port())


def compare(peer: str, n_bytes: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
    from benchmarks.measure import in_turn, machine, peer_extensions, ratios, require

    pythons = {OURS: sys.executable, OURS_ELSEWHERE: sys.executable, THEIRS: peer}
    extensions = peer_extensions()
    running: dict[str, ServedRanks] = {}
    found: dict[str, list[float]] = {name: [] for name in pythons}
    try:
        for name, python in pythons.items():
            running[name] = side(name, python, n_bytes, dtype, extensions)
        about = {name: ranks.answers()[0] for name, ranks in running.items()}
        for what in ("sum", "torch"):
            values = {name: answer[what] for name, answer in about.items()}
            require(len(set(values.values())) == 1, f"all sides have the same {what}: {values}")
        for round_ in range(rounds):
            for name in in_turn(list(pythons), round_):
                # A call ends on the slower rank.
                found[name].append(max(answer["seconds"] for answer in running[name].ask()))
    finally:
        for ranks in running.values():
            ranks.close()
    lines = []
    for name in (OURS, OURS_ELSEWHERE):
        line = {"benchmark": "all_reduce_to_deepspeed", "contender": name, "mib": n_bytes >> 20, "dtype": dtype}
        line |= {"ranks": RANKS, "ms": round(1e3 * statistics.median(found[name]), 2)}
        line |= {"deepspeed_ms": round(1e3 * statistics.median(found[THEIRS]), 2)}
        lines.append({**line, **ratios("deepspeed_over_it", found[THEIRS], found[name]), "machine": machine()})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Time all-reduces of ours and of DeepSpeed's in turns.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: both")
    parser.add_argument("--serve", choices=(OURS, OURS_ELSEWHERE, THEIRS), help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.bytes, options.dtype)
        return
    peer = os.environ.get("DSC_PEER_PYTHON")
    if not peer:
        print("DSC_PEER_PYTHON names no environment with DeepSpeed", file=sys.stderr)
        sys.exit(SKIPPED)
    for dtype in [options.dtype] if options.dtype else ("float32", "bfloat16"):
        for line in compare(peer, options.mib << 20, dtype, options.rounds):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
