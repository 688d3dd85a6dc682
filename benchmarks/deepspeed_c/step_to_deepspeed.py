"""How long are gradients and step of an engine, against real DeepSpeed, with the model's own passes and without them?

Each contender is one process with one thread, like a rank on a machine with as many ranks as cores. The model is that
of ``engine_step`` with 67M parameters, in bf16, with AdamW and clipping, at stages 1 and 2, and at stage 2 with states
offloaded to the host. Both processes live through the whole run and take turns. Their losses have to be the same.
"whole" is forward, backward and step. Forward and backward of the bare module are torch's on both sides, and are timed
in each round. "added" is the time of an engine above the faster side's bare passes: for handing over gradients, norm,
clipping and update. Times are processor time, to which other programs add little. DSC_PEER_PYTHON names the interpreter
of an environment with DeepSpeed and the same torch.
Run: python -m benchmarks.deepspeed_c.step_to_deepspeed [--rounds 5] [--params 67e6]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS, LAYERS, WARMUP = 8, 8, 2
STEPS = 3  # in a round of a contender
SKIPPED = 77
LOSS_TOLERANCE = 0.02
CASES = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, states on the host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def serve(is_ours: bool, case: str, n_params: int) -> None:
    """Measure one contender: print a line of figures for each line of standard input.

    The peer's environment runs this function too.
    """
    if is_ours:
        import deepspeed_c

        deepspeed_c.install_as_deepspeed()
    import deepspeed
    import torch

    torch.set_num_threads(1)
    width = int((n_params / LAYERS) ** 0.5)

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3**0.5)  # so that activations keep their size through all layers
                # DeepSpeed's masters begin as rounded weights, ours as the given weights.
                param.copy_(param.bfloat16())
        return model

    model, bare = make(), make().bfloat16()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "zero_optimization": CASES[case],
    }
    deepspeed.init_distributed("gloo")
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1)).bfloat16()

    def train() -> dict[str, float]:
        begin = time.process_time()
        loss = (engine(x).float() - 1).square().mean()
        after_forward = time.process_time()
        engine.backward(loss)
        after_backward = time.process_time()
        engine.step()
        end = time.process_time()
        return {
            "loss": loss.item(),
            "forward": after_forward - begin,
            "backward": after_backward - after_forward,
            "step": end - after_backward,
        }

    def passes() -> float:
        begin = time.process_time()
        (bare(x).float() - 1).square().mean().backward()
        seconds = time.process_time() - begin
        for param in bare.parameters():
            param.grad = None
        return seconds

    first = train()["loss"]
    for _ in range(WARMUP):
        train()
        passes()
    about = {
        "first_loss": first,
        "engine": type(engine).__module__,
        "params": LAYERS * width * width,
        "torch": torch.__version__,
    }
    print("ready " + json.dumps(about), flush=True)
    for _ in sys.stdin:
        found = []
        for _ in range(STEPS):
            found.append({**train(), "passes": passes()})
        line = {key: statistics.median(each[key] for each in found) for key in found[0]}
        print("round " + json.dumps({**line, "loss": found[-1]["loss"]}), flush=True)
    sys.stdout.flush()
    os._exit(0)


class Contender:
    """A process that measures on request."""

    def __init__(self, python: str, is_ours: bool, case: str, n_params: int, port: int, extensions: str) -> None:
        from benchmarks.measure import require

        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions}
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        # DeepSpeed's update reads the first variable, and ours the second.
        environment |= {"OMP_NUM_THREADS": "1", "DSC_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        if is_ours:
            environment["PYTHONPATH"] = str(ROOT)
        else:  # ninja is found beside its interpreter
            environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"
        command = [python, str(Path(__file__).resolve()), "--serve", "ours" if is_ours else "theirs"]
        command += ["--case", case, "--params", str(n_params)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._answer("ready ")
        own = "deepspeed_c" if is_ours else "deepspeed"
        require(self.about["engine"].split(".")[0] == own, f"the engine of {own} is its own: {self.about['engine']}")

    def _answer(self, head: str) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith(head):
                return json.loads(line.removeprefix(head))
        raise SystemExit(f"{' '.join(self._process.args)}: exit code {self._process.wait()}, no answer")

    def round(self) -> dict[str, float]:
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = self._answer("round ")
        found["whole"] = found["forward"] + found["backward"] + found["step"]
        return found

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def compare(case: str, peer: str, n_params: int, rounds: int) -> dict[str, Any]:
    from benchmarks.measure import in_turn, machine, peer_extensions, ratios, require, require_equal
    from tests.ranks import free_port

    sides = {"ours": (sys.executable, True), "theirs": (peer, False)}
    extensions = peer_extensions()
    running: dict[str, Contender] = {}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    try:
        for name, (python, is_ours) in sides.items():
            running[name] = Contender(python, is_ours, case, n_params, free_port(), extensions)
        versions = {name: each.about["torch"] for name, each in running.items()}
        require(len(set(versions.values())) == 1, f"both environments have the same torch: {versions}")
        for round_ in range(rounds):
            for name in in_turn(list(sides), round_):
                found[name].append(running[name].round())
            # The bare passes do the same work on both sides. On the slower side the C library has returned more memory
            # to the system between passes.
            passes = min(each[-1]["passes"] for each in found.values())
            for each in found.values():
                each[-1]["added"] = each[-1]["whole"] - passes
            require_equal("losses", {name: each[-1]["loss"] for name, each in found.items()}, LOSS_TOLERANCE)
    finally:
        for each in running.values():
            each.close()
    ours, theirs = found["ours"], found["theirs"]
    first = running["ours"].about["first_loss"]
    require(ours[-1]["loss"] < first, f"losses fall: {first} to {ours[-1]['loss']}")
    line: dict[str, Any] = {"benchmark": "step_to_deepspeed", "case": case, "params": running["ours"].about["params"]}
    for key in ("whole", "added", "step"):
        line |= ratios(f"{key}_to_deepspeed", *([each[key] for each in side] for side in (ours, theirs)))
    for name, side in found.items():
        for key in ("forward", "backward", "step", "passes"):
            line[f"{name}_{key}_ms"] = round(1e3 * statistics.median(each[key] for each in side), 1)
    return {**line, "torch": versions["ours"], "machine": machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time steps of our engine and of DeepSpeed's in turns.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--params", type=float, default=67e6)
    parser.add_argument("--case", choices=CASES, help="default: all")
    parser.add_argument("--serve", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve == "ours", options.case, int(options.params))
        return
    peer = os.environ.get("DSC_PEER_PYTHON")
    if not peer:
        print("DSC_PEER_PYTHON names no environment with DeepSpeed", file=sys.stderr)
        sys.exit(SKIPPED)
    for case in [options.case] if options.case else CASES:
        print(json.dumps(compare(case, peer, int(options.params), options.rounds)), flush=True)


if __name__ == "__main__":
    main()
