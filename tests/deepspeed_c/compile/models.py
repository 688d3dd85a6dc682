"""A small language model, its engines with and without a compiler, and the comparison of two runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed_c.utils import safe_get_full_fp32_param
from tests.toys import Mlp
from tests.training import engine_of, step

__all__ = [
    "STEPS",
    "WIDTH",
    "WORDS",
    "Model",
    "batch_of",
    "close",
    "make_block",
    "make_engine",
    "peak_of",
    "same",
    "train",
]

WIDTH, WORDS, STEPS = 12, 23, 3


def make_block() -> Mlp:
    return Mlp(WIDTH, 4 * WIDTH, F.gelu, has_norm=True, adds=True)


class Model(nn.Module):
    """A small language model with a tied head. ``breaks``: its forward runs as several graphs. ``again``: the function
    of activation checkpointing by which its blocks run again in the backward. ``frozen``: its first block is not trained.
    """

    def __init__(self, breaks: bool = False, again: Callable[..., Any] | None = None, frozen: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(3))
        self.blocks[0].requires_grad_(not frozen)
        self.breaks, self.again = breaks, again
        self.fails = False

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """The loss of predicting ``y``; without it, the scores of all words."""
        h = self.words(x)
        for i, block in enumerate(self.blocks):
            h = block(h) if self.again is None else self.again(block, h)
            if self.breaks and i == 1:
                torch._dynamo.graph_break()
        if self.fails:
            raise ValueError("a model that fails")
        scores = F.linear(h, self.words.weight)
        return scores if y is None else F.cross_entropy(scores.flatten(0, 1), y.flatten())


def make_engine(
    stage: int,
    precision: str = "fp32",
    compiled: bool = True,
    debug_log: bool = False,
    zero: dict[str, Any] | None = None,
    graphs: dict[str, Any] | None = None,
    make: Callable[..., nn.Module] = Model,
    gas: int = 2,
    **model: Any,
) -> Any:
    """zero: further keys of zero_optimization. graphs: of compile. make: makes the model. model: its arguments."""
    torch.manual_seed(0)
    module = make(**model)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 700,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 100,
            "stage3_max_live_parameters": 2000,
            **(zero or {}),
        },
        "compile": {"deepcompile": compiled, "debug_log": debug_log, **(graphs or {})},
    }
    if precision in ("bf16", "fp16"):
        config[precision] = {"enabled": True}
    elif precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return engine_of(module, config)


def batch_of(rank: int, i: int, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100 * rank + i)
    return torch.randint(WORDS, (2, length), generator=g), torch.randint(WORDS, (2, length), generator=g)


def train(engine: Any, rank: int, length: Any = lambda i: 5) -> list[Any]:
    """Losses of training and evaluation, norms, and weights at the end."""
    found: list[Any] = []
    for i in range(2 * STEPS):
        x, y = batch_of(rank, i, length(i))
        found.append(step(engine, x, y))
        if i == STEPS:
            with torch.no_grad():
                found.append(engine.eval()(x, y).item())
            engine.train()
    found.append(engine.get_global_grad_norm())
    return found + [safe_get_full_fp32_param(p) for p in engine.module.parameters()]


def same(got: list[Any], want: list[Any]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        equal = torch.equal(a, b) if torch.is_tensor(a) else a == b
        assert equal, f"{i}: {a} instead of {b}"


def close(got: list[Any], want: list[Any], tolerance: float) -> None:
    """``tolerance`` is relative and absolute."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a is None or b is None:
            assert a is b, f"{i}: {a} instead of {b}"
            continue
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), f"{i}: {a} instead of {b}, {(a - b).abs().max()}"


def peak_of(engine: Any) -> int:
    """The most elements of weights that were gathered at once."""
    return 0 if engine._fetcher is None else engine._fetcher.stats.max_live_elems
