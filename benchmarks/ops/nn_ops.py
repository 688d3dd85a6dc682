"""How long do the operators of transformer layers take, forward and backward, beside torch's own: one fused operator
where torch has one, else their composition?

Contenders take turns in one process, in an order that changes with the round, on the same inputs, with the same number
of threads. Results and gradients are compared first. A round of a contender has as many calls as fit a tenth of a
second. The memory of freed results is reused, so that rounds agree. The bound is a simple operator of torch (an
addition) that reads and writes the same number of float32 tensors and bytes, new results included. A large last-level
cache may hold all tensors, and does so for the contenders and for the bound alike. An operand that two arguments share
counts once.
Run: python -m benchmarks.ops.nn_ops [--rows 2048] [--cols 2048] [--rounds 7] [--seconds 0.1] [--threads 1 2]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.measure import (
    bound,
    calls_of_a_round,
    in_turn,
    keep_freed_memory,
    machine,
    median_spread,
    ratios,
    require,
)
from deepspeed_c import _C
from deepspeed_c.ops import nn

Tensors = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    name: str
    operands: Callable[[int, int, torch.dtype], Tensors]
    ours: Callable[..., Any]  # one result, or a tuple of them
    theirs: Callable[..., Any]
    is_fused: bool  # torch has this as one operator
    n_forward: int  # tensors of full size that a forward must move
    n_backward: int
    is_random: bool = False


def rows_and(*kinds: str) -> Callable[[int, int, torch.dtype], Tensors]:
    """Make operands: full: [rows, cols]; vector: [cols]; half: two of [rows, cols] in one tensor."""

    def make(rows: int, cols: int, dtype: torch.dtype) -> Tensors:
        shapes = {"full": (rows, cols), "vector": (cols,), "scores": (1, rows // 256, 256, cols)}
        return tuple(torch.randn(shapes[kind]).to(dtype).requires_grad_() for kind in kinds)

    return make


def rms_with_residual(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> Tensors:
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, 1e-6), total


CASES = [
    Case("layer_norm", rows_and("full", "vector", "vector"), nn.layer_norm, lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), True, 2, 3),
    Case("rms_norm", rows_and("full", "vector"), nn.rms_norm, lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6), True, 2, 3),
    Case("rms_norm + residual", rows_and("full", "vector", "full"), lambda x, w, r: nn.rms_norm(x, w, residual=r), rms_with_residual, False, 4, 3),
    Case("bias_gelu", rows_and("full", "vector"), nn.bias_gelu, lambda x, b: F.gelu(x + b), False, 2, 3),
    Case("gelu", rows_and("full"), nn.bias_gelu, F.gelu, True, 2, 3),
    Case("swiglu", rows_and("full", "full"), nn.swiglu, lambda g, u: F.silu(g) * u, False, 3, 5),
    Case("geglu", rows_and("full", "full"), nn.geglu, lambda g, u: F.gelu(g) * u, False, 3, 5),
    Case(
        "bias_dropout_residual", rows_and("full", "vector", "full"), lambda x, b, r: nn.bias_dropout_residual(x, b, r, 0.1),
        lambda x, b, r: r + F.dropout(x + b, 0.1), False, 3, 2, is_random=True,
    ),
    Case("masked_softmax", rows_and("scores"), lambda x: nn.masked_softmax(x, scale=1.0), lambda x: F.softmax(x, -1), True, 2, 3),
]  # fmt: skip


def gradients(y: Any, operands: Tensors, gradient: torch.Tensor) -> Tensors:
    """Return the gradients of the operands, given the same gradient for each result of the operator."""
    results = y if isinstance(y, tuple) else (y,)
    return torch.autograd.grad(results, operands, [gradient.to(result.dtype) for result in results])


def compare(case: Case, operands: Tensors, gradient: torch.Tensor) -> None:
    """Compare with torch in float32, because some of torch's sums over rows are held in 16 bits."""
    found = []
    wide = tuple(operand.detach().float().requires_grad_() for operand in operands)
    for function, given in ((case.ours, operands), (case.theirs, wide)):
        y = function(*given)
        found.append([*(y if isinstance(y, tuple) else (y,)), *gradients(y, given, gradient)])
    tolerance = 1e-4 if gradient.dtype == torch.float32 else 0.05
    for i, (mine, other) in enumerate(zip(*found)):
        size = float(other.abs().max())
        require(
            torch.allclose(mine.float(), other.float(), rtol=tolerance, atol=tolerance * size),
            f"{case.name}: result {i} is torch's",
        )


def measure(case: Case, dtype: torch.dtype, rows: int, cols: int, rounds: int, seconds_a_round: float) -> None:
    torch.manual_seed(0)
    operands = case.operands(rows, cols, dtype)
    gradient = torch.randn_like(operands[0])
    if not case.is_random:
        compare(case, operands, gradient)
    # The bound uses float32, because with one thread torch's addition of 16-bit elements is slower than memory.
    n_floats = max(1, rows * cols * dtype.itemsize // 4)
    blocks = [torch.ones(n_floats) for _ in range(max(case.n_forward, case.n_backward))]

    def move(n: int) -> None:
        """Move n tensors: n - 1 reads and one write, or several passes of up to three tensors."""
        for _ in range(n // 3):
            torch.add(blocks[0], blocks[1])
        if n % 3 == 2:
            torch.neg(blocks[2 % len(blocks)])
        elif n % 3 == 1:
            blocks[0].sum()

    contenders: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "deepspeed_c": (lambda: case.ours(*operands), lambda y: gradients(y, operands, gradient)),
        "torch": (lambda: case.theirs(*operands), lambda y: gradients(y, operands, gradient)),
        "bound": (lambda: move(case.n_forward), lambda _: move(case.n_backward)),
    }

    def calls_of(forward: Callable[[], Any], backward: Callable[[Any], Any]) -> int:
        return calls_of_a_round(lambda: backward(forward()), seconds_a_round)

    n_calls = {name: calls_of(*steps) for name, steps in contenders.items()}

    def run(name: str) -> tuple[float, float]:
        """Return the seconds of a forward and of a backward."""
        forward, backward = contenders[name]
        seconds_forward = seconds_backward = 0.0
        for _ in range(n_calls[name]):
            begin = time.perf_counter()
            y = forward()
            middle = time.perf_counter()
            backward(y)
            seconds_forward += middle - begin
            seconds_backward += time.perf_counter() - middle
        return seconds_forward / n_calls[name], seconds_backward / n_calls[name]

    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in contenders}
    for round_ in range(rounds + 1):
        for name in in_turn(list(contenders), round_):
            elapsed = run(name)
            if round_ > 0:  # the first round warms up
                for times, value in zip(seconds[name], elapsed):
                    times.append(value)
    for i, phase in enumerate(("forward", "backward")):
        mine, theirs, least = (seconds[name][i] for name in ("deepspeed_c", "torch", "bound"))
        line = {
            "benchmark": "nn_ops",
            "case": case.name,
            "phase": phase,
            "dtype": str(dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "torch_has": "one operator" if case.is_fused else "a composition",
            "mib": round(rows * cols * dtype.itemsize / 2**20, 1),
            "ms": round(median_spread(mine)[0] * 1e3, 2),
            **ratios("ratio_to_torch", mine, theirs),
            **bound("ratio_to_bound", mine, least),
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--cols", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a contender's round")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    keep_freed_memory()
    for n_threads in args.threads:
        torch.set_num_threads(n_threads)
        _C.pool_resize(n_threads)
        for dtype in (torch.float32, torch.bfloat16):
            for case in CASES:
                measure(case, dtype, args.rows, args.cols, args.rounds, args.seconds)


if __name__ == "__main__":
    main()
