"""Models of transformers with sequences split over ranks.

The weights after steps of SGD equal those of one plain process with whole sequences. SGD shows a wrong scale of the
gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed_c
from tests.hf.stack import VOCAB, llama, on_ranks
from tests.training import engine_of, update

STEPS, TOKENS, BATCH = 2, 13, 2
RATE = 0.5


def batches(case: str, micro: int) -> dict[str, torch.Tensor]:
    """The whole sequences of one micro-batch.

    Valid labels are unevenly distributed; in the case "tail" all lie in the first half.
    """
    generator = torch.Generator().manual_seed(100 + micro)
    tokens = torch.randint(3, VOCAB, (BATCH, TOKENS), generator=generator)
    labels = tokens.clone()
    labels[0, :4] = -100
    batch = {"input_ids": tokens, "labels": labels}
    if case == "tail":
        labels[:, 5:] = -100
    if case == "packed":
        batch["position_ids"] = torch.cat([torch.arange(5), torch.arange(2), torch.arange(6)]).expand(BATCH, -1)
        labels[:, [0, 5, 7]] = -100
    if case == "padded":
        mask = torch.ones_like(tokens)
        mask[0, 9:], mask[1, :3] = 0, 0
        labels[mask == 0] = -100
        batch |= {"attention_mask": mask, "position_ids": torch.arange(TOKENS).expand(BATCH, -1)}
    return batch


MODELS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "single": {"num_key_value_heads": 1},
    "pair": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "two": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "uneven": {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8},
}


def mistral(**changes: Any) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": VOCAB, "pad_token_id": 0, "sliding_window": 4}
    return MistralForCausalLM(MistralConfig(**{**sizes, **more, **changes}))


def make_model(kind: str) -> Any:
    return mistral() if kind == "window" else llama(**MODELS[kind])


def plain(kind: str, case: str, gas: int, clip: float, dtype: torch.dtype = torch.float32) -> tuple[dict, list[float]]:
    model = make_model(kind)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.to(dtype)
    norms = []
    for step in range(STEPS):
        model.zero_grad()
        for micro in range(gas):
            # The mean over the valid tokens of the whole sequences.
            batch = batches(case, step * gas + micro)
            (model(**batch, use_cache=False).loss / gas).backward()
        grads = {name: p.grad.float() for name, p in model.named_parameters()}
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        norms.append(norm.item())
        scale = min(1.0, clip / (norm.item() + 1e-6)) if clip else 1.0
        for name, p in model.named_parameters():
            masters[name] -= RATE * scale * grads[name]
            p.data.copy_(masters[name])
    return masters, norms


def gathered(loss: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    """Sums losses like accelerate's script and transformers' Trainer."""
    import torch.distributed.nn.functional as collectives

    group = deepspeed_c.utils.groups._get_sequence_parallel_group()
    losses = torch.stack(collectives.all_gather(loss, group=group))
    counts = torch.stack(collectives.all_gather((shift_labels != -100).sum(), group=group))
    safe = torch.where(counts > 0, losses, torch.zeros_like(losses))
    return (safe * counts).sum() / counts.sum().clamp(min=1)


def weighted(loss: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    """Returns this rank's term of the sum that makes the mean over all ranks."""
    group = deepspeed_c.utils.groups._get_sequence_parallel_group()
    mine = (shift_labels != -100).sum()
    total = mine.clone()
    torch.distributed.all_reduce(total, group=group)
    return torch.where(mine > 0, loss, 0.0) * mine / total


WAYS = {"gathered": gathered, "weighted": weighted, "model's own": lambda loss, shift_labels: loss}


def train(rank: int, world: int, sp: int, cells: list[dict[str, Any]]) -> list[Any]:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    found = []
    for cell in cells:
        kind, case, gas, stage = cell["model"], cell["case"], cell["gas"], cell["stage"]
        model = make_model(kind)
        if cell.get("checkpointing"):
            model.gradient_checkpointing_enable({"use_reentrant": cell["checkpointing"] == "reentrant"})
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": gas,
            "gradient_clipping": cell["clip"],
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": 3000},
            "sequence_parallel": {"attention": cell.get("attention", "auto")},
            **cell.get("config", {}),
        }
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", sp, BATCH)
        engine = engine_of(model, config, mpu=mpu)
        # All ranks of a sequence load the same data here. Each batch therefore arrives once for each rank, and only the
        # first copy is trained on.
        data = [batches(case, i) for i in range(STEPS * gas)]
        loader = UlyssesSPDataLoaderAdapter(
            data, mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group(), sp, engine.device
        )
        norms, given = [], [batch for i, batch in enumerate(loader) if i % sp == 0]
        for step in range(STEPS):
            for micro in range(gas):
                batch = given[step * gas + micro]
                outputs = engine(**batch, labels=batch["shift_labels"], use_cache=False)
                update(engine, WAYS[cell["way"]](outputs.loss, batch["shift_labels"]))
            norms.append(engine.get_global_grad_norm())
        weights = {name: deepspeed_c.utils.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
        found.append((weights, norms, engine.dp_world_size, engine.train_batch_size()))
        engine.close()
    return found


def cell(model: str, case: str, way: str, gas: int, clip: float, stage: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "case": case, "way": way, "gas": gas, "clip": clip, "stage": stage, **more}


CELLS = [
    cell("grouped", "plain", "gathered", 1, 0.0, 0),
    cell("grouped", "plain", "weighted", 2, 0.1, 1),
    cell("grouped", "plain", "model's own", 1, 0.1, 2),
    cell("grouped", "tail", "gathered", 2, 0.0, 3),
    cell("single", "tail", "model's own", 2, 0.1, 2),
    cell("single", "packed", "weighted", 1, 0.0, 3),
    cell("uneven", "packed", "gathered", 2, 0.1, 1),
    cell("uneven", "padded", "model's own", 1, 0.1, 3),
    cell("window", "plain", "gathered", 2, 0.0, 0),
    cell("window", "packed", "weighted", 1, 0.1, 2),
    cell("grouped", "padded", "gathered", 1, 0.0, 2, checkpointing="other"),
    cell("grouped", "packed", "gathered", 1, 0.0, 3, checkpointing="reentrant"),
    cell("grouped", "tail", "gathered", 1, 0.1, 3, attention="ring"),
    cell("single", "packed", "model's own", 2, 0.0, 2, attention="ring"),
    cell("window", "packed", "weighted", 1, 0.1, 1, attention="ring"),
    cell("uneven", "padded", "gathered", 1, 0.0, 0, attention="ring", checkpointing="other"),
    cell("grouped", "packed", "gathered", 2, 0.1, 3, attention="hybrid"),
]


def check(each: Any, found: tuple, weights: dict[str, torch.Tensor], norms: list[float]) -> None:
    """Compares weights and norms of a rank with those of ``plain``."""
    got, got_norms, *_ = found
    torch.testing.assert_close(got_norms, norms, rtol=1e-4, atol=0, msg=f"{each} {got_norms} {norms}")
    for name, value in weights.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=lambda m: f"{each} {name} {m}")  # noqa: B023


@pytest.mark.parametrize("sp", [2, 4])
def test_as_one_plain_process(sp: int) -> None:
    everyone = on_ranks(sp, train, sp, CELLS)
    for i, each in enumerate(CELLS):
        weights, norms = plain(each["model"], each["case"], each["gas"], each["clip"])
        for of_rank in everyone:
            assert of_rank[i][2:] == (1, BATCH * each["gas"])
            check(each, of_rank[i], weights, norms)
