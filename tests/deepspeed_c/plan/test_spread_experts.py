"""Plans with the section ``expert_parallel`` equal runs of two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.config import load_config
from deepspeed_c.engine.precision import Precision
from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.plan.activations import ForwardShape, trace_activations
from deepspeed_c.plan.generation import GenerationShape
from deepspeed_c.plan.memory import STATE
from deepspeed_c.plan.sizes import stack_of
from deepspeed_c.plan.table import plan_table
from tests.deepspeed_c.plan.test_memory import TOLERANCE, config, live_bytes, take_steps
from tests.hf.expert_families import make
from tests.toys import Mlp

WIDTH, INNER, N_EXPERTS = 512, 700, 4
N_STACKED = N_EXPERTS * 3 * WIDTH * INNER
N_DENSE = 2 * (WIDTH * WIDTH + WIDTH) + N_EXPERTS * WIDTH


def spread(stage: int, n_ranks: int = 2, **more: Any) -> dict[str, Any]:
    return config(stage, expert_parallel={"enabled": True, "autoep_size": n_ranks}, **more)


def mixture() -> torch.nn.Module:
    """A Mixtral's block between two dense layers."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    settings = MixtralConfig(hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=N_EXPERTS)
    block = MixtralSparseMoeBlock(settings)
    for param in block.parameters():
        if not param.is_meta:
            torch.nn.init.normal_(param, std=0.02)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), block, torch.nn.Linear(WIDTH, WIDTH))


def run_mixture(rank: int, world: int, settings: dict, under_init: bool) -> tuple[dict[str, int], int]:
    """(peaks of the phases, bytes of the optimizer's states)."""
    with live_bytes() as live:
        with live.phase("build"), deepspeed_c.zero.Init(config_dict_or_path=settings, enabled=under_init):
            model = mixture()
        with live.phase("initialize"):
            engine, *_ = deepspeed_c.initialize(model=model, config=settings)
        del model
        rows = torch.ones(1, 3, WIDTH, dtype=next(engine.module.parameters()).dtype)
        take_steps(engine, live, lambda: rows)
        tensors = [t for s in engine.optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()]
        n_bytes = sum(t.nbytes for t in tensors)
    engine.close()
    return live.peaks, n_bytes


CASES = [
    *((stage, n_ranks, False) for stage in range(4) for n_ranks in (1, 2)),
    (2, 2, True),
    (3, 2, True),
]


@pytest.mark.parametrize(("stage", "n_ranks", "under_init"), CASES)
def test_a_rank_is_planned_with_its_part_of_the_experts(run_ranks, stage, n_ranks, under_init):
    settings = spread(stage, n_ranks)
    with torch.device("meta"):
        model = mixture()
    table = plan_table(settings, 2, model=model, is_sharded=under_init)
    plan = table.rows[table.chosen].plan
    held = N_DENSE + N_STACKED // n_ranks
    assert (table.sizes.numel, table.sizes.n_held) == (N_DENSE + N_STACKED, held)
    assert any(f"over {n_ranks} ranks" in note for note in table.notes), table.notes
    measured = run_ranks(2, run_mixture, settings, under_init)
    lines = [f"stage {stage}, experts on {n_ranks} ranks: MB planned, measured on each rank"]
    for name, phase in plan.phases.items():
        lines.append(f"  {name:10s} {phase.nbytes / 1e6:8.2f} {[round(p[name] / 1e6, 2) for p, _ in measured]}")
    print("\n".join(lines))
    # Two moments in fp32: of all that a rank holds, or of the part that it updates.
    n_updated = held if stage == 0 else (N_DENSE + N_STACKED) / 2
    states = plan.phases["step"].kinds[STATE]
    assert states == measured[0][1] == pytest.approx(8 * n_updated, rel=0.01), (states, measured[0][1])
    worst = max(abs(p.nbytes / max(peaks[n] for peaks, _ in measured) - 1) for n, p in plan.phases.items())
    assert worst <= TOLERANCE, "\n".join(lines)


def test_offload_and_tensor_parallel_ranks_beside_it():
    table_of = {}
    for n_tensor in (1, 2):
        with torch.device("meta"):
            model = make("mixtral")
        table = plan_table(spread(2), 2 * n_tensor, model=model, n_tensor=n_tensor, device_type="cuda")
        assert all(row.plan is not None for row in table.rows), [row.refusal for row in table.rows]
        table_of[n_tensor] = table
    experts = [p for p in table_of[1].sizes.params if p.n_expert_ranks > 1]
    assert [p.numel for p in table_of[2].sizes.params if p.n_expert_ranks > 1] == [p.numel for p in experts]
    assert table_of[2].sizes.n_held < table_of[1].sizes.n_held


def test_what_initialize_refuses_is_refused():
    for settings, model, error, message in (
        (spread(1, 3), mixture, ConfigError, "cannot be divided among 3"),
        (spread(1, 2), lambda: Mlp(8, 8, torch.relu), ModelError, "no mixture of experts"),
        (spread(1, 2) | {"expert_parallel": {"enabled": True, "preset_model": "mistral"}}, lambda: make("mixtral"),
         ConfigError, "'mistral' is not the family"),
    ):  # fmt: skip
        with torch.device("meta"):
            outline = model()
        with pytest.raises(error, match=message):
            plan_table(settings, 6, model=outline)
    with torch.device("meta"):
        model = mixture()
    with pytest.raises(ConfigError, match="autoep_size"):
        plan_table(spread(1, 4), 2, model=model)
    with pytest.raises(ModelError, match="which of them are experts"):
        plan_table(spread(1), 2, sizes=stack_of(10_000, 2))


def saved_bytes(rank: int, world: int, n_ranks: int) -> int:
    """Bytes saved by autograd in a forward with equally many rows for all experts."""
    with deepspeed_c.initialize(model=mixture(), config=spread(2, n_ranks, precision="fp32"))[0] as engine:
        weights = {p.untyped_storage()._cdata for p in engine.module.parameters()}
        experts = engine.module[1].experts
        tokens = torch.arange(64)
        indices = torch.stack((tokens, tokens + 1), 1) % N_EXPERTS
        experts.register_forward_pre_hook(lambda _, args: (args[0], indices, args[2]))
        held: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.detach()) or t, lambda t: t):
            engine(torch.ones(1, 64, WIDTH))
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
        return sum(n for place, n in storages.items() if place not in weights)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_activations_are_those_of_an_even_load(run_ranks, n_ranks):
    settings = spread(2, n_ranks, precision="fp32")
    with torch.device("meta"):
        model = mixture()
    plan_table(settings, 2, model=model)  # spreads the experts
    policy = Precision(load_config(settings, world_size=2), model)
    traced = trace_activations(model, ForwardShape(1, sample=(64, WIDTH)), policy, None, "cpu")
    measured = run_ranks(2, saved_bytes, n_ranks)
    assert measured[0] == measured[1]
    assert traced.saved_bytes == pytest.approx(measured[0], rel=0.01)


def test_batches_and_generation_are_planned_too():
    with torch.device("meta"):
        model = make("mixtral")
    table = plan_table(spread(2), 2, model=model, batch=ForwardShape(2, 16), generates=GenerationShape(2, 8, 4))
    assert table.activations.backward > 0 and all(moment.cache for moment in table.generation)


TRAINER = """
import json, sys
import deepspeed_c
deepspeed_c.install_as_deepspeed()
from transformers import Trainer, TrainingArguments
from tests.hf.expert_families import make
config = json.load(open(sys.argv[1]))
settings = {"per_device_train_batch_size": 1, "learning_rate": 1e-3, "bf16": True, "use_cpu": True, "report_to": []}
arguments = TrainingArguments(sys.argv[2], deepspeed=config, **settings)
Trainer(make("mixtral"), arguments, train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}] * 8).train()
"""


def test_scripts_of_the_trainer_and_searches(tmp_path):
    """Each candidate of a search is planned on a whole model."""
    (tmp_path / "train.py").write_text(TRAINER)
    jobs = []
    for n_ranks in (2, 3, 1, 2):
        name, own = f"candidate {len(jobs)}", tmp_path / f"{len(jobs)}.json"
        settings = spread(2, n_ranks, autotuning={"enabled": True, "metric_path": name})
        own.write_text(json.dumps(settings))
        arguments = [str(own), str(tmp_path)]
        jobs.append({"name": name, "group": "all", "arguments": arguments, "n_samples": 1, "metric_path": name})
    request = {"script": str(tmp_path / "train.py"), "n_ranks": 2, "n_local": 2, "jobs": jobs}
    request |= {"shape": {"n_tokens": 8}, "answer": str(tmp_path / "answer.json")}
    (tmp_path / "request.json").write_text(json.dumps(request))
    command = [sys.executable, "-m", "deepspeed_c.autotuning.planning", str(tmp_path / "request.json")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    plans = list(json.loads((tmp_path / "answer.json").read_text())["plans"].values())
    assert plans[0]["host"] == plans[3]["host"] < plans[2]["host"]
    assert "autoep_size" in plans[1]["refusal"]
