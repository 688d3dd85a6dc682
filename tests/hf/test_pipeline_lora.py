"""Adapters of peft in pipelines at ZeRO stage 3: the frozen weights and the adapters of a stage are sharded, and train
as in one plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hf.stack import on_ranks
from tests.hf.test_pipeline import N_BATCHES, bare, batches_of, model_of
from tests.training import config, descend, engine_of, whole_weights

STEPS = 4
# Outputs of frozen layers in bf16 are rounded, so a difference in the last bit of an adapter becomes a larger one.
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-4}
# Units of single matrices, and a limit that holds the largest of them alone.
UNITS = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 2048}
LIMITS = {"all": {}, "one": {"stage3_max_live_parameters": 2048, "stage3_prefetch_bucket_size": 0}}
BASES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def adapted(name: str, base: str, targets: Any = "all-linear", **options: Any) -> Any:
    """A model of peft: adapters in fp32, whose products are not zero, beside frozen weights."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        model_of(name), LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, **options)
    )
    generator = torch.Generator().manual_seed(4)
    for key, p in model.named_parameters():
        p.data = p.data.to(torch.float32 if p.requires_grad else BASES[base])
        if "lora_" in key:
            p.data = torch.randn(p.shape, generator=generator) * 0.05
    return model


def trained_of(module: Any) -> list[torch.nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def train(rank: int, world: int, name: str, base: str, adapters: dict[str, Any], schedule: str, zero: Any) -> Any:
    """(losses, the loss of an evaluation, whole weights by transformers' names)."""
    from deepspeed_c.pipe import from_transformers
    from deepspeed_c.zero.weights.param import state_of

    module = from_transformers(adapted(name, base, **adapters), 2, schedule=schedule)
    settings = config(
        3, rows=2, params={"momentum": 0.9}, accumulate=N_BATCHES, zero={**UNITS, **zero}, gradient_clipping=0.0
    )
    with engine_of(module, settings, model_parameters=trained_of(module)) as engine:
        data_rank = module.mpu().get_data_parallel_rank()
        assert world == 2 or all(state_of(p) is not None for p in module.parameters())
        losses = [float(engine.train_batch(iter(batches_of(step, data_rank)))) for step in range(STEPS)]
        evaluation = float(engine.eval_batch(iter(batches_of(9))))
        weights = {bare(key): value for key, value in whole_weights(module).items()}
    return losses, evaluation, weights


def plain(name: str, base: str, adapters: dict[str, Any], n_pipelines: int) -> Any:
    """The same with peft and torch alone."""
    model = adapted(name, base, **adapters).train()
    optimizer = torch.optim.SGD(trained_of(model), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        batches = [batch for rank in range(n_pipelines) for batch in batches_of(step, rank)]
        terms = [model(**inputs, labels=labels).loss for inputs, labels in batches]
        losses.append(descend(optimizer, sum(terms) / len(batches)))
    with torch.no_grad():
        evaluation = sum(float(model.eval()(**x, labels=y).loss) for x, y in batches_of(9)) / N_BATCHES
    return losses, evaluation, {key: p.detach() for key, p in model.get_base_model().named_parameters()}


def check(outcome: list[Any], expected: Any, tolerance: float) -> None:
    losses, evaluation, weights = expected
    seen = set()
    for rank, (got, evaluated, mine) in enumerate(outcome):
        assert got == pytest.approx(losses, rel=tolerance), f"rank {rank}"
        assert evaluated == pytest.approx(evaluation, rel=tolerance), f"rank {rank}"
        for name, value in mine.items():
            error = float((value.float() - weights[name].float()).abs().max())
            assert value.dtype == weights[name].dtype and error <= tolerance, f"rank {rank}, {name}: {error}"
            if not weights[name].requires_grad and "lora_" not in name and "modules_to_save" not in name:
                assert error == 0, f"rank {rank}: the frozen {name} has changed by {error}"
            seen.add(name)
    assert seen == set(weights), seen ^ set(weights)


def both(rank: int, world: int, *given: Any) -> Any:
    """The pipeline's run, and on rank 0 the plain one: peft is loaded in the ranks alone."""
    name, base, adapters, _, _ = given
    return train(rank, world, *given), plain(name, base, adapters, world // 2) if rank == 0 else None


@pytest.mark.parametrize(
    ("name", "base", "adapters", "schedule", "limit"),
    [
        ("llama", "fp32", {}, "1f1b", "all"),
        ("llama", "fp32", {}, "zb_v", "one"),
        ("llama tied", "fp32", {}, "zb_h1", "all"),
        ("llama tied", "fp32", {}, "1f1b", "one"),
        ("llama", "bf16", {}, "zb_h1", "one"),
        ("llama", "fp32", {"modules_to_save": ["lm_head"]}, "zb_h1", "all"),
        # The second stage has no adapter.
        ("llama", "fp32", {"layers_to_transform": [0], "targets": ["q_proj", "v_proj"]}, "1f1b", "all"),
        ("llama", "fp32", {"layers_to_transform": [0], "targets": ["q_proj", "v_proj"]}, "zb_h1", "one"),
        ("gpt2", "fp32", {"use_dora": True}, "zb_h1", "all"),
    ],
    ids=str,
)
def test_adapters_train_as_in_one_plain_process(name, base, adapters, schedule, limit):
    outcome = on_ranks(4, both, name, base, adapters, schedule, LIMITS[limit])
    check([run for run, _ in outcome], outcome[0][1], TOLERANCE[base])
