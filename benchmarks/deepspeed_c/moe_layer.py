"""How long does a layer of experts take, against the matrix products that it cannot avoid and against other layers?

One layer of 8 gated experts, top-2, without drops, forward and backward, on 2,048 tokens of 512 in fp32. The contenders
take turns: a dense MLP on as many rows as the experts get, transformers' experts with `grouped_mm`, and DeepSpeed's
layer (in its own environment, DSC_PEER_PYTHON). All but the MLP have the same weights, and their outputs have to be
equal. "routing" is the same layer without its experts: gate, sorting, gathering, combining, and their gradients.
Run: python -m benchmarks.deepspeed_c.moe_layer [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, INNER, EXPERTS, K = 512, 1024, 8, 2
WARMUP = 2


def values_of(torch: Any, name: str, shape: tuple[int, ...]) -> Any:
    """The values of a tensor, the same in every contender."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5


def make_expert(torch: Any) -> Any:
    class Expert(torch.nn.Module):
        """Llama's MLP."""

        def __init__(self) -> None:
            super().__init__()
            self.gate_up = torch.nn.Linear(HIDDEN, 2 * INNER, bias=False)
            self.down = torch.nn.Linear(INNER, HIDDEN, bias=False)

        def forward(self, x: Any) -> Any:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return self.down(torch.nn.functional.silu(gate) * up)

    return Expert()


def make_layer(torch: Any, layer_class: Any) -> Any:
    """A layer of experts with the names of DeepSpeed's, filled by name."""
    layer = layer_class(
        HIDDEN, make_expert(torch), num_experts=EXPERTS, k=K, drop_tokens=False, top2_2nd_expert_sampling=False
    )
    with torch.no_grad():
        for name, param in layer.named_parameters():
            param.copy_(values_of(torch, name, tuple(param.shape)))
    return layer


def stepper(torch: Any, compute: Callable[[Any], Any], params: list[Any], tokens: int) -> Callable[[], float]:
    """A function that runs one forward and backward and returns a number that all contenders agree on."""
    x = values_of(torch, "tokens", (tokens, HIDDEN)).requires_grad_()
    grad = values_of(torch, "gradient", (tokens, HIDDEN))

    def step() -> float:
        x.grad = None
        for param in params:
            param.grad = None
        out = compute(x)
        out.backward(grad[: out.shape[0]])
        return float(out.detach().abs().sum()) + float(x.grad.abs().sum())

    return step


def serve(tokens: int, threads: int) -> None:
    """Measure DeepSpeed's layer, in its environment: an answer for each line of standard input."""
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE

    torch.set_num_threads(threads)
    deepspeed.init_distributed("gloo")
    layer = make_layer(torch, MoE)
    layer.set_deepspeed_parallelism()
    step = stepper(torch, lambda x: layer(x)[0], list(layer.parameters()), tokens)
    for _ in range(WARMUP):
        step()

    def answer(values: dict[str, Any]) -> None:
        print("answer " + json.dumps(values), flush=True)

    answer({"torch": torch.__version__, "layer": type(layer).__module__})
    for _ in sys.stdin:
        begin = time.perf_counter()
        value = step()
        answer({"seconds": time.perf_counter() - begin, "value": value})


def peer_of(python: str, tokens: int, threads: int) -> Any:
    from benchmarks.measure import peer_extensions
    from benchmarks.served import Served
    from tests.ranks import free_port

    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": peer_extensions()}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": str(threads)}
    environment.pop("PYTHONPATH", None)
    environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"
    command = [python, str(Path(__file__).resolve()), "--serve", "--tokens", str(tokens), "--threads", str(threads)]
    return Served(command, environment)


def measure(tokens: int, threads: int, rounds: int) -> dict[str, Any]:
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from benchmarks.measure import in_turn, median_spread, ratios, require, require_equal
    from deepspeed_c.moe.layer import MoE
    from deepspeed_c.ops import moe as ops

    torch.set_num_threads(threads)
    layer = make_layer(torch, MoE)
    gate = layer.deepspeed_moe.gate
    experts = list(layer.deepspeed_moe.experts.deepspeed_experts)
    dense = make_expert(torch)
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS)
    config._experts_implementation = "grouped_mm"
    grouped = MixtralExperts(config)
    with torch.no_grad():
        grouped.gate_up_proj.copy_(torch.stack([expert.gate_up.weight for expert in experts]))
        grouped.down_proj.copy_(torch.stack([expert.down.weight for expert in experts]))
    rows = values_of(torch, "rows", (tokens * K, HIDDEN)).requires_grad_()
    row_grad = values_of(torch, "gradient of rows", (tokens * K, HIDDEN))

    def of_transformers(x: Any) -> Any:
        _, _, _, chosen, _, weights, _ = gate(x, None, True)
        return grouped(x, chosen.t().long(), weights.t())

    def routing(x: Any) -> Any:
        _, _, n_experts, chosen, _, weights, _ = gate(x, None, True)
        order, inverse, _ = ops.sort_slots(chosen.t().contiguous(), n_experts)
        return ops.combine_rows(ops.gather_rows(x, order, K, inverse), inverse, weights.t().contiguous())

    def mlp() -> float:
        rows.grad = None
        for param in dense.parameters():
            param.grad = None
        dense(rows).backward(row_grad)
        return 0.0

    params = [*layer.parameters(), *grouped.parameters()]
    steps = {
        "ours": stepper(torch, lambda x: layer(x)[0], params, tokens),
        "transformers": stepper(torch, of_transformers, params, tokens),
        "routing": stepper(torch, routing, params, tokens),
        "mlp": mlp,
    }
    python = os.environ.get("DSC_PEER_PYTHON", "")
    peer = peer_of(python, tokens, threads) if python else None
    names = [*steps, *(["deepspeed"] if peer else [])]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    values: dict[str, float] = {}
    try:
        if peer:
            about = peer.answer()
            require(about["torch"] == torch.__version__, f"both environments have the same torch: {about}")
            require(about["layer"].startswith("deepspeed.moe"), f"the peer's layer is its own: {about}")
        for i in range(rounds + WARMUP):
            for name in in_turn(names, i):
                begin = time.perf_counter()
                if name == "deepspeed":
                    peer.ask()
                    found = peer.answer()
                    values[name], spent = found["value"], found["seconds"]
                else:
                    values[name] = steps[name]()
                    spent = time.perf_counter() - begin
                if i >= WARMUP:
                    seconds[name].append(spent)
    finally:
        if peer:
            peer.close()
    require(int(layer.deepspeed_moe.exp_counts.sum()) == tokens * K, "no token was dropped")
    require_equal("outputs and gradients", {n: v for n, v in values.items() if n not in ("mlp", "routing")}, 1e-4)
    line: dict[str, Any] = {"tokens": tokens, "hidden": HIDDEN, "experts": EXPERTS, "k": K, "threads": threads}
    for name, spent in seconds.items():
        line[f"{name}_ms"] = round(1e3 * median_spread(spent)[0], 2)
        if name not in ("ours", "routing"):
            line |= ratios(f"ratio_to_{name}", seconds["ours"], spent)
    if peer:  # what no layer of these experts can be faster than
        line |= ratios("mlp_to_deepspeed", seconds["mlp"], seconds["deepspeed"])
    line |= ratios("mlp_to_transformers", seconds["mlp"], seconds["transformers"])
    return line | ratios("routing_part", seconds["routing"], seconds["ours"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a layer of experts and other layers in turns.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", action="store_true", help="(internal) measure DeepSpeed's layer on request")
    args = parser.parse_args()
    if args.serve:
        return serve(args.tokens, args.threads)
    from benchmarks.measure import machine

    line = measure(args.tokens, args.threads, args.rounds)
    print(json.dumps({"benchmark": "moe_layer", **line, "machine": machine()}), flush=True)
    return None


if __name__ == "__main__":
    main()
