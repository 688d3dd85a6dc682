"""Plans of pipelines with tensor-parallel ranks and with frozen layers, against engines that run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deepspeed_c.plan.memory import WEIGHTS
from deepspeed_c.plan.pipeline import as_json, plan_pipeline
from deepspeed_c.plan.script import find_model
from tests.deepspeed_c.pipe.models import micro_batches
from tests.deepspeed_c.plan.test_pipeline import TOLERANCE, N, chosen, config_of, module_of
from tests.ranks import run_ranks
from tests.training import engine_of

SCRIPT = """
import json, sys
import deepspeed_c
from tests.deepspeed_c.plan.test_pipeline_with import built, trained
net = built(sys.argv[1])
deepspeed_c.initialize(model=net, model_parameters=trained(net), config=json.loads(sys.argv[2]))
"""


CUT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.up\..*"], "partition_type": "column"},
        {"patterns": [r".*\.down\..*"], "partition_type": "row"},
        {"patterns": [".*"], "partition_type": "skip"},
    ],
}


def built(kind: str) -> Any:
    net = module_of("1f1b", 1)
    for name, param in net.named_parameters():
        # A stage's layers in part, and of the other stage the norm alone.
        param.requires_grad_(kind != "frozen" or name.startswith(("1.", "2.", "6.")))
    return net


def trained(net: Any) -> list[Any]:
    return [p for p in net.parameters() if p.requires_grad]


def settings(kind: str) -> dict[str, Any]:
    found = config_of(3, 10**9)
    if kind == "tensor ranks":
        # Of two ranks a stage, both hold parts of the same layers: shards have one rank, so weights are not gathered.
        found["zero_optimization"]["stage"] = 2
        found["tensor_parallel"] = {"autotp_size": 2, "partition_config": CUT}
    return found


def measured(rank: int, world: int, kind: str) -> dict[str, int]:
    """The bytes of weights of a rank, and the gathers of its third batch."""
    net = built(kind)
    with engine_of(net, settings(kind), model_parameters=trained(net)) as engine:
        fetcher, found = engine._fetcher, {}
        if fetcher is None:
            return {"weights": sum(p.numel() * p.element_size() for p in net.parameters())}
        found["weights"] = sum(unit.weight_bytes for unit in {group.unit for group in fetcher.groups})
        found["elems"] = sum(group.numel for group in fetcher.groups)
        for step in range(3):
            before = fetcher.stats.n_gathers
            engine.train_batch(iter(micro_batches(step, net.mpu().get_data_parallel_rank(), N)))
        found["n_gathers"] = fetcher.stats.n_gathers - before
        return found


@pytest.mark.parametrize("kind", ["frozen", "tensor ranks"])
def test_a_plan_has_the_bytes_of_the_engine(tmp_path: Path, kind):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    find = partial(find_model, str(path), [kind, json.dumps(settings(kind))], 4)
    first = find(rank=0)
    found = plan_pipeline(lambda rank: find(rank=rank), first, first.read_source(), 4, every_stage=False)
    ranks = json.loads(json.dumps(as_json(found)))["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 2]
    outcome = run_ranks(4, measured, kind)
    for rank in ranks:
        real = outcome[rank["rank"]]
        planned = chosen(rank)["phases"]["batch"]["kinds"][WEIGHTS]
        assert planned == pytest.approx(real["weights"], rel=TOLERANCE), (rank["rank"], planned, real)
        for name in real.keys() - {"weights"}:
            assert rank["batch"][name] == pytest.approx(real[name], rel=TOLERANCE), (rank["rank"], name, real)
