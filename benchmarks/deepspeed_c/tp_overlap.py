"""How much of tensor parallelism's communication does ``tp_overlap_comm`` hide, with 4 ranks over a shaped link?

Four hosts (network namespaces of this machine, links shaped by tc tbf) have one rank each. The cut regions of a small
Llama sleep instead of computing, because an accelerator leaves the host idle in the same way. Each column and row
product takes a time in proportion to its tokens. So do both halves of its backward: the gradient of the input and the
gradient of the weight. "silent" is the same model without sums between ranks. "Hidden" is the share of the time above
the silent model that the overlap removes.
Run as root: python -m benchmarks.deepspeed_c.tp_overlap [--rounds 7]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_c
from benchmarks.hosts import run_on_hosts
from benchmarks.measure import in_turn, median_spread, ratios, require, require_equal
from deepspeed_c.inject import exchange, layers, overlap

HOSTS = (0, 1, 2, 3)
RATE = "400mbit"
WARMUP = 2
SAMPLES, TOKENS, WIDTH = 8, 32, 512
MS_PRODUCT = 5.0  # for all tokens; a region of Llama has 3 or 4 products, and its sum takes about as long


def sleep_for(x: torch.Tensor) -> None:
    """Sleep for the time of a product of these tokens."""
    time.sleep(MS_PRODUCT / 1e3 * x.shape[:-1].numel() / (SAMPLES * TOKENS))


class SlowLinear(torch.autograd.Function):
    """A linear layer that also sleeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        sleep_for(x)
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        sleep_for(dy)
        sleep_for(dy)
        return dy @ weight, dy.flatten(0, -2).t() @ x.flatten(0, -2)


def slow_down() -> None:
    """Make the products of cut layers sleep in forward, in the gradient of the input, and in the gradient of the
    weight.
    """
    product, backward, weights = overlap._Product.forward, overlap._Product.backward, overlap._Weights.backward

    def slow_forward(ctx: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        sleep_for(x)
        return product(ctx, x, *rest)

    def slow_backward(ctx: Any, dy: torch.Tensor) -> Any:
        sleep_for(dy)
        return backward(ctx, dy)

    def slow_weights(ctx: Any, grad: torch.Tensor) -> Any:
        for dy, _ in ctx.held[0].products:
            sleep_for(dy)
        return weights(ctx, grad)

    overlap._Product.forward, overlap._Product.backward = staticmethod(slow_forward), staticmethod(slow_backward)
    overlap._Weights.backward = staticmethod(slow_weights)


def make_model(n_layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=WIDTH,
            intermediate_size=256,
            num_hidden_layers=n_layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=8,
            use_cache=False,
        )
    ).train()


def slow_layers(model: Any, *, overlaps: bool) -> Any:
    """Make the products of ``model`` sleep. With overlap, column layers sleep already."""
    for module in model.model.layers.modules():
        if isinstance(module, layers.TensorParallelLayer) and not (overlaps and isinstance(module, layers.LinearLayer)):
            module.product = lambda x, weight, bias: SlowLinear.apply(x, weight)
    return model


def make_engine(n_layers: int, *, overlaps: bool) -> Any:
    model = make_model(n_layers)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "tensor_parallel": {"autotp_size": dist.get_world_size(), "tp_overlap_comm": overlaps},
    }
    engine = deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    slow_layers(model, overlaps=overlaps)
    return engine


class Silence:
    """A context without sums among ranks."""

    def __enter__(self) -> None:
        self._kept = exchange.sum_start, exchange.sum_
        exchange.sum_start = lambda x, comm, label: x.clone()
        exchange.sum_ = lambda x, comm, label, waits=True: None

    def __exit__(self, *error: object) -> None:
        exchange.sum_start, exchange.sum_ = self._kept


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    slow_down()
    engines = {name: make_engine(args.layers, overlaps=name == "overlap") for name in ("usual", "overlap")}
    cut = deepspeed_c.tp_model_init(make_model(args.layers), dist.get_world_size(), None)
    alone = slow_layers(cut, overlaps=False)
    seconds: dict[str, list[float]] = {name: [] for name in ("usual", "overlap", "silent")}
    losses: dict[str, list[float]] = {name: [] for name in seconds}

    def step(name: str, i: int) -> None:
        ids = torch.randint(256, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(i))
        dist.barrier()
        begin = time.perf_counter()
        if name == "silent":
            with Silence():
                alone(input_ids=ids, labels=ids).loss.backward()
        else:
            loss = engines[name](input_ids=ids, labels=ids).loss
            engines[name].backward(loss)
            losses[name].append(loss.item())
        dist.barrier()
        seconds[name].append(time.perf_counter() - begin)
        if name == "silent":
            alone.zero_grad()
        else:
            engines[name].step()

    for i in range(args.rounds + WARMUP):
        for name in in_turn(list(seconds), i):
            step(name, i)
    for i, (a, b) in enumerate(zip(losses["usual"], losses["overlap"], strict=True)):
        require_equal(f"losses of step {i}", {"usual": a, "overlap": b}, 1e-4)
    times = {name: found[WARMUP:] for name, found in seconds.items()}
    usual, overlapped, silent = (median_spread(times[name])[0] for name in ("usual", "overlap", "silent"))
    require(usual > 1.1 * silent, f"communication takes time: {usual} s and {silent} s")
    above = {name: [t - s for t, s in zip(times[name], times["silent"])] for name in ("usual", "overlap")}
    row = {
        "layers": args.layers,
        "ms": round(1e3 * overlapped, 1),
        "ms_usual": round(1e3 * usual, 1),
        "ms_silent": round(1e3 * silent, 1),
        "hidden": round(1 - (overlapped - silent) / (usual - silent), 3),
    }
    return [row | ratios("exposed_to_usual", above["overlap"], above["usual"])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    return run_on_hosts("tp_overlap", HOSTS, RATE, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
