"""How much time do tiles take, and how much memory do they save? A loss over a large vocabulary, and a gated MLP, whole
and in tiles.

The contenders take turns in one process with one forward and backward each. Peaks are live bytes
(`deepspeed_c/plan/live_bytes.py`) of a separate pass, above the bytes that live before the pass. `peak_between` leaves out
the output of an MLP and the gradient of its input, which both contenders need. Three losses are compared: torch's
cross-entropy of whole logits, the same cross-entropy a tile at a time (`TiledFusedLogitsLoss`), and our loss, as
`"tiles": "auto"` computes it.
Run: python -m benchmarks.deepspeed_c.tiles
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.measure import in_turn, machine, median_spread, ratios, require, require_equal
from deepspeed_c.plan.live_bytes import LiveBytes
from deepspeed_c.sequence.loss import tiled_cross_entropy
from deepspeed_c.sequence.tiles import TiledFusedLogitsLoss, TiledMLP

MIB = 1 << 20
LOSS_TILES, MLP_TILES = 16, 8


class MLP(nn.Module):
    """Llama's MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def torch_loss(head: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(x), y)


class Part(NamedTuple):
    """A measured part of a model: the ways to compute it, the sizes of the outputs that these have made, and the
    tensors that live before.
    """

    ways: dict[str, Callable[[], float]]
    seen: list[int]
    given: list[torch.Tensor]


def losses_of(tokens: int, words: int, width: int) -> Part:
    torch.manual_seed(1)
    head, x = nn.Linear(width, words, bias=False), torch.randn(tokens, width).requires_grad_()
    y = torch.randint(words, (tokens,))
    y[::7] = -100
    seen: list[int] = []
    head.register_forward_hook(lambda module, args, output: seen.append(output.numel()))

    def step(compute: Callable[[], torch.Tensor]) -> float:
        x.grad = head.weight.grad = None
        loss = compute()
        loss.backward()
        return loss.item() + float(x.grad.abs().sum()) + float(head.weight.grad.abs().sum())

    def fused() -> torch.Tensor:
        return TiledFusedLogitsLoss.apply(torch_loss, head, x[None], y[None], None, LOSS_TILES, [head.weight], "mean")

    ways = {
        "whole": lambda: step(lambda: torch_loss(head, x, y)),
        "tiles": lambda: step(lambda: tiled_cross_entropy(head, x, y, LOSS_TILES, weights=[head.weight])),
        "fused": lambda: step(fused),
    }
    return Part(ways, seen, [x, y, head.weight])


def mlps_of(tokens: int, width: int) -> Part:
    torch.manual_seed(1)
    mlp, x = MLP(width), torch.randn(1, tokens, width).requires_grad_()
    seen: list[int] = []
    mlp.up.register_forward_hook(lambda module, args, output: seen.append(output.numel()))

    def step(compute: Callable[[], torch.Tensor]) -> float:
        x.grad = None
        for param in mlp.parameters():
            param.grad = None
        output = compute()
        output.backward(torch.ones((), dtype=x.dtype).expand_as(output))
        return float(output.detach().abs().sum()) + float(x.grad.abs().sum()) + float(mlp.up.weight.grad.abs().sum())

    ways = {
        "whole": lambda: step(lambda: mlp(x)),
        "tiles": lambda: step(lambda: TiledMLP.apply(MLP.forward, mlp, x, MLP_TILES, list(mlp.parameters()))),
    }
    return Part(ways, seen, [x, *mlp.parameters()])


def peak_of(step: Callable[[], Any], given: list[torch.Tensor]) -> int:
    for tensor in given:
        tensor.grad = None
    live = LiveBytes()
    with live:
        _ = [tensor.detach() for tensor in given]  # so that ``live`` counts them
        before = live.nbytes()
        with live.phase("step"):
            step()
    return live.peaks["step"] - before


def measure(part: Part, n_tiles: int, rounds: int, kept: int = 0) -> dict[str, Any]:
    """Measure a part. ``kept`` is the number of bytes of its output and its input's gradient, which all ways need."""
    ways, seen = part.ways, part.seen
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    values, largest = {}, {}
    for i in range(rounds + 1):
        for name in in_turn(list(ways), i):
            seen.clear()
            begin = time.perf_counter()
            values[name] = ways[name]()
            if i:
                seconds[name].append(time.perf_counter() - begin)
            largest[name] = max(seen)
    require_equal("values and gradients", values, 1e-4)
    for name in ways:
        if name != "whole":
            require(largest[name] * n_tiles == largest["whole"], f"{n_tiles} tiles of equal size: {largest}")
    row: dict[str, Any] = {}
    peaks = {name: peak_of(step, part.given) for name, step in ways.items()}
    for name, peak in peaks.items():
        row[f"peak_mib_{name}"] = round(peak / MIB, 1)
        row[f"seconds_{name}"] = round(median_spread(seconds[name])[0], 4)
        if name != "whole":
            row[f"peak_of_whole_{name}"] = round(peak / peaks["whole"], 4)
            row[f"peak_between_of_whole_{name}"] = round((peak - kept) / (peaks["whole"] - kept), 4)
            row |= ratios(f"time_of_whole_{name}", seconds[name], seconds["whole"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--mlp-tokens", type=int, default=16384)
    parser.add_argument("--words", type=int, default=32768)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    row = measure(losses_of(options.tokens, options.words, options.width), LOSS_TILES, options.rounds)
    sizes = {"tokens": options.tokens, "words": options.words, "width": options.width}
    print(json.dumps({"benchmark": "tiled_loss", "part": "loss", **sizes, **row, "machine": machine()}))
    kept = 2 * options.mlp_tokens * options.width * 4
    row = measure(mlps_of(options.mlp_tokens, options.width), MLP_TILES, options.rounds, kept)
    sizes = {"tokens": options.mlp_tokens, "width": options.width}
    print(json.dumps({"benchmark": "tiled_loss", "part": "MLP", **sizes, **row, "machine": machine()}))


if __name__ == "__main__":
    main()
