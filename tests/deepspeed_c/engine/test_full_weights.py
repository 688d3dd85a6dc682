"""``engine.iter_full_weights``: all weights under the names of the model's files, at every stage."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from deepspeed_c.errors import ConfigError, FeatureError, StateError
from deepspeed_c.moe.layer import MoE
from tests.ranks import run_ranks
from tests.toys import llama
from tests.training import config, engine_of, step

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
loading = pytest.importorskip("transformers.core_model_loading")

VOCAB = 31
SMALL = {"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30}
JOINT = {"comm": {"local": "shm", "zero_copy_gather": True}}
OFFLOAD = {"offload_param": {"device": "cpu"}}


def make(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "mixtral":
        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=VOCAB, **sizes, **heads))
    model = llama(2, vocab_size=VOCAB, max_position_embeddings=64, tie_word_embeddings=kind == "tied")
    if kind in ("lora", "dora"):
        adapted = ["q_proj", "down_proj", *(["embed_tokens"] if kind == "lora" else [])]
        settings = peft.LoraConfig(
            target_modules=adapted, modules_to_save=["lm_head"], init_lora_weights=False, use_dora=kind == "dora"
        )
        model = peft.get_peft_model(model, settings)
    if kind == "frozen":
        model.model.embed_tokens.requires_grad_(False)
    return model


def tokens_of(rank: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, 5), generator=torch.Generator().manual_seed(rank))


def expected(model: Any, adapters: str) -> dict[str, torch.Tensor]:
    """The tensors that the libraries themselves make of a model in one process."""
    if not hasattr(model, "peft_config"):
        return {} if adapters == "only" else loading.revert_weight_conversion(model, model.state_dict())
    saved = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    if adapters == "only":
        return saved
    if adapters == "merged":
        return copy.deepcopy(model).merge_and_unload().state_dict()
    # peft keeps the trained module when it unloads; below the adapter there is the original one.
    mark = ".original_module"
    below = {
        name.removeprefix("base_model.model.").replace(mark, ""): value
        for name, value in model.state_dict().items()
        if mark in name
    }
    return copy.deepcopy(model).unload().state_dict() | below | saved


def compare(engine: Any, plain: Any, adapters: str) -> None:
    weights = engine.iter_full_weights(1000, adapters=adapters)
    entries = weights.entries
    found = {name: tensor.clone() for name, tensor in weights}
    assert [entry.name for entry in entries] == list(found)
    want = expected(plain, adapters)
    assert found.keys() == want.keys(), found.keys() ^ want.keys()
    for entry in entries:
        value = found[entry.name]
        assert (entry.shape, entry.dtype) == (value.shape, value.dtype), entry
        assert entry.n_bytes == value.nbytes
        assert torch.equal(value, want[entry.name]), (entry.name, float((value - want[entry.name]).abs().max()))


def whole_body(rank: int, world: int, kind: str, stage: int, zero: dict[str, Any], sections: dict[str, Any]) -> Any:
    model = make(kind)
    plain = copy.deepcopy(model)
    tp = sections.get("tensor_parallel", {}).get("autotp_size", 1)
    tokens = tokens_of(rank // tp)
    with engine_of(model, config(stage, zero={**SMALL, **zero}, **sections)) as engine:
        step(engine, input_ids=tokens, labels=tokens)
        plain.load_state_dict(engine.module_state_dict())
        for adapters in ("merged", "apart", "only"):
            compare(engine, plain, adapters)
        own = [(name, tensor.nbytes) for name, tensor in engine.iter_full_weights(to="each")]
        of_all = engine._comm.gather_objects(own)
        names = [name for rank_own in of_all for name, _ in rank_own]
        assert sorted(names) == sorted(expected(plain, "merged")), names
        assert all(of_all), "a rank got nothing"
        assert bool([name for name, _ in engine.iter_full_weights(to="rank0")]) == (rank == 0)
        ties = {entry.name: entry.tied_to for entry in engine.iter_full_weights().entries if entry.tied_to}
        assert ties == ({"lm_head.weight": "model.embed_tokens.weight"} if kind == "tied" else {}), ties
        frozen = [entry.name for entry in engine.iter_full_weights().entries if entry.is_frozen]
        assert ("model.embed_tokens.weight" in frozen) == (kind in ("frozen", "dora")), frozen
        return step(engine, input_ids=tokens, labels=tokens)


CELLS = [
    *[(kind, stage, {}, {}) for kind in ("plain", "tied", "lora", "dora", "mixtral") for stage in (0, 3)],
    *[("tied", stage, {}, {}) for stage in (1, 2)],
    ("frozen", 3, {}, {}),
    *[(kind, 3, {}, JOINT) for kind in ("plain", "lora", "mixtral")],
    *[(kind, 3, OFFLOAD, {}) for kind in ("plain", "lora")],
    *[(kind, stage, {}, {"tensor_parallel": {"autotp_size": 2}}) for kind in ("plain", "tied") for stage in (0, 3)],
    ("plain", 3, {}, {"bf16": {"enabled": True}}),
    *[("mixtral", stage, {}, {"expert_parallel": {"enabled": True, "autoep_size": 3}}) for stage in (0, 3)],
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join([cell[0], str(cell[1]), *cell[2], *cell[3]]))
def test_weights_are_those_of_the_libraries_in_one_process(cell):
    n_ranks = 3 if "expert_parallel" in cell[3] else 4 if "tensor_parallel" in cell[3] and cell[1] else 2
    losses = run_ranks(n_ranks, whole_body, *cell)
    assert all(map(math.isfinite, losses)), losses


def test_files_of_nvme_are_read(tmp_path):
    offload = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    run_ranks(2, whole_body, "plain", 3, offload, {})


def experts_body(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), MoE(8, torch.nn.Linear(8, 8), 4, ep_size=2, drop_tokens=False))
    with engine_of(model, config(2)) as engine:
        found = {name: tensor.clone() for name, tensor in engine.iter_full_weights()}
        assert [entry.name for entry in engine.iter_full_weights().entries] == list(found)
        return found, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def test_experts_of_all_ranks_come_under_their_numbers():
    outcome = run_ranks(2, experts_body)
    mark = "deepspeed_experts."
    want = {}
    for rank, (_, own) in enumerate(outcome):
        for name, value in own.items():
            before, found, after = name.partition(mark)
            local, _, rest = after.partition(".")
            want[f"{before}{mark}{2 * rank + int(local)}.{rest}" if found else name] = value
    assert len(want) == len(outcome[0][1]) + 4, want.keys()
    for found, _ in outcome:
        assert found.keys() == want.keys(), found.keys() ^ want.keys()
        for name, value in found.items():
            assert torch.equal(value, want[name]), name


class _NoMore(Exception):
    pass


def early_body(rank: int, world: int, stage: int, sections: dict[str, Any]) -> Any:
    with engine_of(make("plain"), config(stage, zero=SMALL, **sections)) as engine:
        want = [entry.name for entry in engine.iter_full_weights().entries]
        for last in (0, 1, 5):
            found = []
            for name, _ in engine.iter_full_weights("1kB"):
                found.append(name)
                if rank == 0 and len(found) > last:
                    break
            assert found == (want[: last + 1] if rank == 0 else want)
        seen = []
        with pytest.raises(_NoMore):
            for name, _ in engine.iter_full_weights():
                seen.append(name)
                if len(seen) == rank + 2:
                    raise _NoMore
        gathers = engine._fetcher.stats.n_gathers if stage == 3 else 0
        with engine.iter_full_weights("1kB") as weights:
            next(weights)
        gathered = (engine._fetcher.stats.n_gathers if stage == 3 else 0) - gathers
        held = engine._fetcher.live() if stage == 3 else []
        tokens = tokens_of(rank)
        return step(engine, input_ids=tokens, labels=tokens), gathered, held


@pytest.mark.parametrize("stage, sections", [(0, {}), (3, {}), (3, JOINT)], ids=["0", "3", "joint"])
def test_a_rank_that_ends_early_leaves_no_rank_waiting(stage, sections):
    for loss, gathered, held in run_ranks(3, early_body, stage, sections):
        assert math.isfinite(loss)
        if sections != JOINT:  # there a gather takes no memory, and all are started at once
            assert gathered <= 3, gathered  # all ranks had ended, so the rest was not gathered
        assert held == []


def memory_body(rank: int, world: int, bytes_ahead: int) -> tuple[int, int, int]:
    with engine_of(make("plain"), config(3, zero=SMALL)) as engine:
        fetcher = engine._fetcher
        largest = max(group.source.cost.memory for group in fetcher.groups)
        peak = 0
        for _ in engine.iter_full_weights(bytes_ahead):
            peak = max(peak, sum(group.source.cost.memory for group in fetcher.groups if group.buffer is not None))
        return peak, largest, sum(group.source.cost.memory for group in fetcher.groups)


@pytest.mark.parametrize("bytes_ahead", [0, 30_000, 1 << 30])
def test_gathers_run_ahead_within_the_bytes(bytes_ahead):
    for peak, largest, total in run_ranks(2, memory_body, bytes_ahead):
        assert peak <= max(bytes_ahead, largest), (peak, largest, total)
        assert peak >= min(total, max(largest, bytes_ahead - largest)), (peak, largest, total)


def bad_body(rank: int, world: int) -> Any:
    with engine_of(make("plain"), config(3, zero=SMALL)) as engine:
        for arguments in ({"to": "rank1"}, {"adapters": "sum"}, {"bytes_ahead": "much"}):
            with pytest.raises(ConfigError) as caught:
                engine.iter_full_weights(**arguments)
            assert next(iter(arguments)) in str(caught.value) and str(next(iter(arguments.values()))) in str(
                caught.value
            )
        tokens = tokens_of(rank)
        weights = engine.iter_full_weights("1kB")
        next(weights)
        step(engine, input_ids=tokens, labels=tokens)
        with pytest.raises(StateError) as caught:
            next(weights)
        weights.close()
        inside = []
        engine.module.model.norm.register_forward_pre_hook(lambda *_: inside.append(_refused(engine)))
        with torch.no_grad():
            engine(input_ids=tokens)
        assert len(inside) == 1
        return str(caught.value), inside[0]


def _refused(engine: Any) -> str:
    with pytest.raises(StateError) as caught:
        engine.iter_full_weights()
    return str(caught.value)


def test_bad_input_is_refused():
    for changed, inside in run_ranks(2, bad_body):
        assert "the weights have changed" in changed and "engine.step()" in changed, changed
        assert "pass is running" in inside, inside


def quantized_body(rank: int, world: int) -> str:
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = torch.nn.Sequential(bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4"), torch.nn.Linear(64, 4))
    model = model.to("cpu")
    model[0].weight.requires_grad_(False)
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0"]), model)
    with engine_of(adapted, config(3, zero=SMALL)) as engine:
        with pytest.raises(FeatureError) as caught:
            engine.iter_full_weights()
        found = {name: tensor.clone() for name, tensor in engine.iter_full_weights(adapters="apart")}
        assert found["0.weight"].shape == (64, 64) and found["0.weight"].is_floating_point()
        assert {"0.lora_A.weight", "0.lora_B.weight"} < found.keys(), found.keys()
        return str(caught.value)


def test_adapters_of_codes_come_apart_only():
    pytest.importorskip("bitsandbytes")
    for said in run_ranks(2, quantized_body):
        assert "codes" in said and "apart" in said, said
