"""Recomputed layers of real models at stages 2 and 3: adapters, experts with different inputs, nested layers, and
compiled parts.

Each model is compared with the same engine without recomputation, bit for bit, and with plain torch in one process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c import checkpointing
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.recompute.blocks import Blocks
from deepspeed_c.zero import GatheredParameters
from tests.toys import Mlp
from tests.training import config, engine_of, update

LR, STEPS, ROWS, TOKENS, N_WORDS, WIDTH = 0.05, 3, 2, 12, 61, 16
FILES = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
SECTIONS = {
    "recomputed": {"layers": "auto"},
    "files": {"layers": "auto", "offload": FILES},
    "budget": {"layers": "auto", "budget": 40_000},
    "budget and files": {"layers": "auto", "budget": 40_000, "offload": FILES},
}


class Inner(nn.Module):
    """Recomputes half of itself by its own call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpointing.checkpoint(self._half, self.norm(x))
        return x + nn.functional.dropout(self.down(y), 0.1, self.training)

    def _half(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x)).sigmoid()


def compiled() -> nn.Module:
    return Mlp(WIDTH, 3 * WIDTH, lambda x: torch.compile(_squash, backend="aot_eager", fullgraph=True)(x), adds=True)


def _squash(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x).sigmoid() * x


class Stacked(nn.Module):
    """Layers of one kind between an embedding and a loss."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N_WORDS, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(WIDTH, N_WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make(kind: str) -> nn.Module:
    torch.manual_seed(7)
    if kind in ("nested", "compiled"):
        return Stacked(Inner if kind == "nested" else compiled)
    import transformers

    usual = {
        "vocab_size": N_WORDS, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if kind == "experts":
        settings = {**usual, "num_local_experts": 5, "num_experts_per_tok": 1, "experts_implementation": "eager"}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings))
    import peft

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**usual))
    lora = peft.LoraConfig(
        r=3, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(model, lora)


def tokens(step: int, rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, N_WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(10 * step + rank))
    return {"input_ids": ids, "labels": ids}


def loss_of(output: Any) -> torch.Tensor:
    return output if torch.is_tensor(output) else output.loss


def trained(rank: int, world: int, kind: str, stage: int, section: dict) -> Any:
    model = make(kind)
    params = list(model.parameters())
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 900}
    settings = config(stage, rows=ROWS, lr=LR, zero=zero, gradient_clipping=0.0, activation_checkpointing=section)
    losses = []
    with engine_of(model, settings) as engine:
        for step in range(STEPS):
            torch.manual_seed(100 * step + rank)
            losses.append(update(engine, loss_of(engine(**tokens(step, rank)))))
        with GatheredParameters(params):
            weights = [p.detach().clone() for p in params]
    return losses, weights


def expected(kind: str, world: int) -> tuple[list[list[float]], list[torch.Tensor]]:
    model, losses = make(kind).train(), [[] for _ in range(world)]
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(world):
            torch.manual_seed(100 * step + rank)
            loss = loss_of(model(**tokens(step, rank)))
            losses[rank].append(loss.item())
            (loss / world).backward()
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= LR * param.grad
    return losses, [param.detach() for param in model.parameters()]


CELLS = [(kind, stage, name) for kind in ("adapters", "experts", "nested") for stage in (2, 3) for name in SECTIONS]
CELLS += [("compiled", stage, name) for stage in (0, 3) for name in ("recomputed", "files", "budget")]


@pytest.mark.parametrize(("kind", "stage", "name"), CELLS)
def test_training_is_that_without_recomputation(run_ranks: Callable, kind: str, stage: int, name: str) -> None:
    want_losses, want = expected(kind, 2)
    plain = run_ranks(2, trained, kind, stage, {}, preload="tests.hf.preload")
    for rank, (losses, weights) in enumerate(
        run_ranks(2, trained, kind, stage, SECTIONS[name], preload="tests.hf.preload")
    ):
        assert losses == plain[rank][0], (losses, plain[rank][0])
        assert losses == pytest.approx(want_losses[rank], rel=2e-5)
        for a, b, c in zip(weights, plain[rank][1], want, strict=True):
            assert torch.equal(a, b)
            assert torch.allclose(a, c, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["nested", "compiled"])
def test_a_model_with_layers_within_layers_is_compiled_without_a_break(kind: str) -> None:
    torch._dynamo.reset()
    model = make(kind).eval()
    blocks = Blocks(model, ActivationCheckpointing(layers="auto"))
    wanted = make(kind).eval()
    batch = tokens(0, 0)
    compiled = torch.compile(lambda **batch: model(**batch), backend="aot_eager", fullgraph=True)
    (loss, other) = compiled(**batch), wanted(**batch)
    loss.backward()
    other.backward()
    assert torch.allclose(loss, other)
    for a, b in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-6)
    blocks.close()
