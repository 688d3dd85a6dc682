"""How long is a bf16 training step on a processor without products of bf16, where our products replace torch's?

The 29M-parameter GPT of ``train_step`` at ZeRO stage 2 on 2 ranks of one thread, 2 x 128 tokens a rank. The case "avx2"
limits torch and our own code to AVX2, the case "native" limits nothing. "auto" is bf16 with the default
``"cpu_products": "auto"``, "torch" the same with ``"torch"``. "fp32" is our step in fp32: its products are as fast, and
its messages have twice the bytes. "fsdp2" is bf16 in torch's FSDP2 with fp32 masters, "deepspeed" bf16 in DeepSpeed.
DSC_PEER_PYTHON names the interpreter of an environment with DeepSpeed and the same torch. Without this variable
DeepSpeed is left out.

Every contender has processes of its own, because kernels of products act on a whole process. They live through the
whole run and take turns. A round of a contender is the median of three steps. Torch's bf16 on AVX2 takes 20 seconds for
a step: its contenders make one step a round, in the first ``--slow-rounds`` only. All losses have to be close at each
step. The kernels have to be there in "auto" on AVX2, and nowhere else. In "native" the losses of "auto" and "torch"
have to have the same bits.
Run: python -m benchmarks.deepspeed_c.products_step [--rounds 9] [--slow-rounds 2] [--tokens 128]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import in_turn, machine, median_spread, peer_extensions, ratios, require, require_equal
from benchmarks.ops.linear import AVX2
from benchmarks.served import ServedRanks, say

ROOT = Path(__file__).resolve().parents[2]
RANKS, WARMUP, WARMUP_TOKENS = 2, 2, 8
STEPS = 3  # in a round of a contender that is not slow
LR = 1e-4
LOSS_TOLERANCE = 0.01
CASES = {"avx2": ("auto", "fp32", "torch", "fsdp2", "deepspeed"), "native": ("auto", "torch")}
SLOW = ("torch", "fsdp2", "deepspeed")  # on AVX2


def serve(contender: str) -> None:
    """Measure one rank of one contender on request. The peer's environment runs this function too."""
    import torch
    import torch.distributed as dist

    from benchmarks.deepspeed_c.train_step import BATCH, LENGTH, VOCAB, Gpt, seeded

    torch.set_num_threads(1)
    model = seeded(Gpt)
    n_params = sum(param.numel() for param in model.parameters())
    step = fsdp2_step(model) if contender == "fsdp2" else engine_step(contender, model)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))

    def train(n_tokens: int, n_steps: int) -> dict[str, Any]:
        batch = ids[:, :n_tokens].contiguous()
        seconds, losses = [], []
        for _ in range(n_steps):
            dist.barrier()
            begin = time.perf_counter()
            losses.append(step(batch))
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
        return {"seconds": statistics.median(seconds), "losses": losses}

    # A step of few tokens makes all that a first step makes.
    train(WARMUP_TOKENS, WARMUP)
    say(
        {
            "is_widened": torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "BackendSelect"),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "params": n_params,
            "tokens": BATCH,
            "torch": torch.__version__,
        }
    )
    for line in sys.stdin:
        say(train(*map(int, line.split())))
    sys.stdout.flush()
    os._exit(0)


def engine_step(contender: str, model: Any) -> Callable[[Any], float]:
    from benchmarks.deepspeed_c.train_step import BATCH

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": contender != "fp32"},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
    }
    if contender == "deepspeed":
        import deepspeed as package
    else:
        import deepspeed_c as package

        config["cpu_products"] = "auto" if contender == "fp32" else contender
    package.init_distributed("gloo")
    engine = package.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    require(type(engine).__module__.split(".")[0] == package.__name__, f"{contender} runs on its own engine")

    def step(batch: Any) -> float:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def fsdp2_step(model: Any) -> Callable[[Any], float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    # The weights stay gathered between forward and backward, like those of stage 2.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)

    def step(batch: Any) -> float:
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


class Contender:
    """The ranks of one contender, and what they have answered."""

    def __init__(self, name: str, python: str, case: str, cache: str) -> None:
        from tests.ranks import free_port

        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": peer_extensions()}
        environment |= {"OMP_NUM_THREADS": "1", "DSC_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        # A new folder, so that the times of the products are measured here.
        environment["XDG_CACHE_HOME"] = cache
        if case == "avx2":
            environment |= AVX2
        if name == "deepspeed":  # ninja is found beside its interpreter
            environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"
        command = [python, "-m", "benchmarks.deepspeed_c.products_step", "--serve", name]
        self._ranks = ServedRanks(command, environment, RANKS, free_port())
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.about = self._ranks.answers()[0]
        is_replaced = name == "auto" and case == "avx2"
        require(self.about["is_widened"] == is_replaced, f"kernels of {name}, {case}: {self.about}")
        require((self.about["isa"] == "AVX2") == (case == "avx2"), f"instructions of {name}, {case}: {self.about}")

    def train(self, n_tokens: int, n_steps: int) -> None:
        answers = self._ranks.ask(f"{n_tokens} {n_steps}")
        self.seconds.append(max(each["seconds"] for each in answers))
        self.losses += answers[0]["losses"]

    def close(self) -> None:
        self._ranks.close()


def compare(case: str, options: argparse.Namespace) -> None:
    peer = os.environ.get("DSC_PEER_PYTHON")
    pythons = {name: peer if name == "deepspeed" else sys.executable for name in CASES[case]}
    running: dict[str, Contender] = {}
    with tempfile.TemporaryDirectory() as cache:
        try:
            for name, python in pythons.items():
                if python:
                    running[name] = Contender(name, python, case, cache)
            versions = {name: each.about["torch"] for name, each in running.items()}
            require(len(set(versions.values())) == 1, f"all have the same torch: {versions}")
            for round_ in range(options.rounds):
                for name in in_turn(list(running), round_):
                    is_slow = case == "avx2" and name in SLOW
                    if not is_slow or round_ < options.slow_rounds:
                        running[name].train(options.tokens, 1 if is_slow else STEPS)
        finally:
            for each in running.values():
                each.close()
    losses = {name: each.losses for name, each in running.items()}
    for step in range(min(map(len, losses.values()))):
        of_step = {name: found[step] for name, found in losses.items()}
        require_equal(f"losses of step {step}", of_step, LOSS_TOLERANCE)
    require(losses["auto"][-1] < losses["auto"][0], f"losses fall: {losses['auto']}")
    if case == "native":
        require(losses["auto"] == losses["torch"], f"losses have the same bits: {losses}")
    for name, each in running.items():
        line = {
            "benchmark": "products_step",
            "contender": name,
            "isa": case,
            "dtype": "fp32" if name == "fp32" else "bf16",
        }
        line |= {"params": each.about["params"], "ranks": RANKS, "tokens": each.about["tokens"] * options.tokens}
        line |= {"rounds": len(each.seconds), "ms": round(1e3 * median_spread(each.seconds)[0], 1)}
        for other, theirs in running.items():
            n = min(len(each.seconds), len(theirs.seconds))
            if other != name:
                line |= ratios(f"ratio_to_{other}", each.seconds[:n], theirs.seconds[:n])
        print(json.dumps({**line, "torch": each.about["torch"], "machine": machine()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time bf16 training steps with our products and with torch's.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--slow-rounds", type=int, default=2, help="of the contenders with torch's bf16 on AVX2")
    parser.add_argument("--tokens", type=int, default=128, help="of a sample, 128 at most")
    parser.add_argument("--case", choices=CASES, help="default: all")
    parser.add_argument("--serve", choices=CASES["avx2"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    for case in [options.case] if options.case else CASES:
        compare(case, options)


if __name__ == "__main__":
    main()
