"""Plans of pipelines with tensor-parallel ranks, with frozen layers and of transformers' models, against engines that
run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import deepspeed_c
from deepspeed_c.errors import FeatureError
from deepspeed_c.plan.live_bytes import LiveBytes
from deepspeed_c.plan.memory import WEIGHTS
from deepspeed_c.plan.pipeline import as_json, plan_pipeline
from deepspeed_c.plan.script import find_model
from tests.deepspeed_c.pipe.models import VOCABULARY, micro_batches
from tests.deepspeed_c.plan.test_pipeline import TOLERANCE, N, chosen, config_of, module_of
from tests.ranks import run_ranks
from tests.training import engine_of

SCRIPT = """
import json, sys
import deepspeed_c
from tests.deepspeed_c.plan.test_pipeline_with import built, trained
net = built(sys.argv[1], sys.argv[3])
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


def llama(n_heads: int = 4, width: int = 64, **options: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "vocab_size": VOCABULARY, "num_hidden_layers": 4}
    return LlamaConfig(**sizes, num_attention_heads=n_heads, num_key_value_heads=n_heads // 2, **options)


def built_of_transformers(kind: str, folder: str) -> Any:
    from transformers import LlamaForCausalLM

    from deepspeed_c.pipe import from_transformers

    if kind == "a folder":
        return from_transformers(folder, 2)
    if kind in ("a configuration", "a configuration within zero.Init"):
        with deepspeed_c.zero.Init(enabled=kind != "a configuration"):
            return from_transformers(llama(tie_word_embeddings=True), 2)
    if kind == "weights too large for any host":
        return from_transformers(llama(1 << 10, 1 << 20), 2)
    model = LlamaForCausalLM(llama())
    if kind == "a model with frozen layers":
        for name, param in model.named_parameters():
            param.requires_grad_("mlp" in name)
        return from_transformers(model, 2)
    import peft

    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    return from_transformers(peft.get_peft_model(model, adapters), 2)


def built(kind: str, folder: str) -> Any:
    if kind not in ("frozen", "tensor ranks"):
        return built_of_transformers(kind, folder)
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


def measured(rank: int, world: int, kind: str, folder: str) -> dict[str, int]:
    """The bytes of weights of a rank, and the gathers of its third batch."""
    net = built(kind, folder)
    with engine_of(net, settings(kind), model_parameters=trained(net)) as engine:
        fetcher, found = engine._fetcher, {}
        if fetcher is None:
            return {"weights": sum(p.numel() * p.element_size() for p in net.parameters())}
        found["weights"] = sum(unit.weight_bytes for unit in {group.unit for group in fetcher.groups})
        found["elems"] = sum(group.numel for group in fetcher.groups)
        for step in range(3):
            before = fetcher.stats.n_gathers, fetcher.stats.n_received_bytes
            engine.train_batch(iter(micro_batches(step, net.mpu().get_data_parallel_rank(), N)))
        found["n_gathers"] = fetcher.stats.n_gathers - before[0]
        found["received_bytes"] = fetcher.stats.n_received_bytes - before[1]
        found["n_units"] = len(fetcher.groups)
        return found


def check(kind: str, at: Path, preload: str = "") -> None:
    folder = str(at / "model")
    find = finder(kind, at)
    first = find(rank=0)
    found = plan_pipeline(lambda rank: find(rank=rank), first, first.read_source(), 4, every_stage=False)
    ranks = json.loads(json.dumps(as_json(found)))["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 2]
    outcome = run_ranks(4, measured, kind, folder, preload=preload)
    for rank in ranks:
        real = outcome[rank["rank"]]
        planned = chosen(rank)["phases"]["batch"]["kinds"][WEIGHTS]
        assert planned == pytest.approx(real["weights"], rel=TOLERANCE), (rank["rank"], planned, real)
        for name in real.keys() - {"weights"}:
            assert rank["batch"][name] == pytest.approx(real[name], rel=TOLERANCE), (rank["rank"], name, real)


def finder(kind: str, at: Path) -> Any:
    path = at / "train.py"
    path.write_text(SCRIPT)
    return partial(find_model, str(path), [kind, json.dumps(settings(kind)), str(at / "model")], 4)


@pytest.mark.parametrize("kind", ["frozen", "tensor ranks"])
def test_a_plan_has_the_bytes_of_the_engine(tmp_path: Path, kind):
    check(kind, tmp_path)


@pytest.mark.parametrize(
    "kind",
    [
        "a configuration", "a configuration within zero.Init", "a folder", "a model with frozen layers",
        "a model with adapters",
    ],
)  # fmt: skip
def test_models_of_transformers_have_the_bytes_of_the_engine(tmp_path: Path, kind):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    transformers.LlamaForCausalLM(llama()).save_pretrained(tmp_path / "model")
    check(kind, tmp_path, preload="tests.deepspeed_c.inject.preload")


def test_weights_of_transformers_take_no_memory(tmp_path: Path):
    pytest.importorskip("transformers")
    # A layer has 40 TiB.
    find = finder("weights too large for any host", tmp_path)
    with LiveBytes() as live, live.phase("plan"):
        found = find(rank=2)
    assert all(param.is_meta for param in found.model.parameters())
    assert sum(param.numel() for param in found.model.parameters()) > 2**40
    assert live.peaks["plan"] < 2**20, live.peaks


def test_layers_are_not_measured_in_a_plan(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text("""
import torch
from deepspeed_c.pipe import PipelineModule
layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
PipelineModule(layers, num_stages=2, partition_method="profile", example_input=torch.ones(1, 2))
""")
    with pytest.raises(FeatureError, match=r"profile(.|\n)*no data in a plan"):
        find_model(str(path), [], 2, rank=0)
