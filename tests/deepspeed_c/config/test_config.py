"""The resolved Config cannot be changed, at any depth, and describes itself."""

import copy
import json
import pickle

import pytest

from deepspeed_c.config import Config, load_config
from deepspeed_c.config.keys import FrozenDict, Section
from deepspeed_c.config.schema import Root, fields_of, find, walk
from deepspeed_c.errors import ConfigError

TREE = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.9, 0.99]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "leaf_module": {"names": ["a"]}, "stage3_max_live_parameters": 5},
    "autotuning": {"arg_mappings": {"a": {"b": [1, 2]}}},
    "tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["p"], "shape": [[1], -1]}]}},
    "compression_training": {"row_pruning": {"different_groups": {"g": {"related_modules": [["m"]]}}}},
    "x-note": "kept",
}


@pytest.fixture
def config():
    return load_config(TREE, world_size=2)


def test_values(config):
    assert isinstance(config, Config)
    assert config.batch == (8, 4, 1, 2)
    assert config.batch.micro_batch_size * config.batch.accumulation_steps * config.batch.world_size == 8
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (4, 1)
    assert config.optimizer.params["betas"] == (0.9, 0.99)


def test_nothing_can_be_changed_at_any_depth(config):
    n_checked = 0

    def check(value, path):
        nonlocal n_checked
        n_checked += 1
        if isinstance(value, Section):
            for name in value.__struct_fields__:
                if path == "" and name == "_given":
                    continue  # private attributes; as_dict() returns copies
                with pytest.raises(AttributeError):
                    setattr(value, name, None)
                check(getattr(value, name), f"{path}.{name}")
        elif isinstance(value, FrozenDict):
            for change in (
                *(lambda: value.__setitem__("a", 1), lambda: value.__delitem__(next(iter(value), "a"))),
                *(lambda: value.update(a=1), lambda: value.pop("a", None), lambda: value.setdefault("zzz", 1)),
                *(value.clear, value.popitem),
            ):
                with pytest.raises(TypeError, match="read-only"):
                    change()
            with pytest.raises(TypeError, match="read-only"):
                value |= {"a": 1}
            for name, entry in value.items():
                check(entry, f"{path}[{name}]")
        elif isinstance(value, tuple):
            for entry in value:
                check(entry, f"{path}[]")
        else:
            assert value is None or isinstance(value, (bool, int, float, str)), (path, type(value))

    check(config, "")
    assert n_checked > 450


def test_hash_and_equality_of_frozen_dicts():
    assert hash(FrozenDict({"a": 1, "b": 2})) == hash(FrozenDict({"b": 2, "a": 1}))
    assert FrozenDict({"a": 1}) == {"a": 1} == dict(FrozenDict({"a": 1}))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_copies_and_pickles_are_equal(config, again):
    other = again(config)
    assert type(other) is Config and other.lines() == config.lines()
    assert other.source_of("bf16.enabled") == "user" and other.as_dict() == TREE
    with pytest.raises(TypeError, match="read-only"):
        other.optimizer.params["lr"] = 1


def test_as_dict_is_what_was_given(config):
    assert config.as_dict() == TREE
    config.as_dict()["zero_optimization"]["stage"] = 0
    assert config.as_dict() == TREE


def test_resolved_dict_has_every_key_and_is_plain(config):
    tree = config.resolved_dict()
    assert json.loads(json.dumps(tree)) == tree
    assert tree["zero_optimization"]["stage"] == 2 and tree["zero_optimization"]["overlap_comm"] is False
    assert tree["train_micro_batch_size_per_gpu"] == 4
    assert tree["optimizer"]["params"]["eps"] == 1e-8
    assert list(tree) == list(fields_of(Root))
    for path, field in walk():
        if "<name>" not in path and "[]" not in path and ".params" not in path:
            place = tree
            for part in path.split("."):
                if place is None:
                    break
                assert part in place, path
                place = place[part]


def test_resolved_dict_is_a_configuration_again(config):
    tree = config.resolved_dict()
    again = load_config(tree, world_size=2)
    assert again.lines() == config.lines()


def test_sources(config):
    expected = {
        "train_batch_size": "user", "train_micro_batch_size_per_gpu": "derived",
        "gradient_accumulation_steps": "default", "zero_optimization.stage": "user",
        "zero_optimization.overlap_comm": "derived", "zero_optimization.reduce_bucket_size": "default",
        "optimizer.params.lr": "user", "optimizer.params.eps": "default",
    }  # fmt: skip
    assert {path: config.source_of(path) for path in expected} == expected
    assert all(config.source_of(path) in ("user", "derived", "default") for path, _ in walk())


def test_source_of_an_unknown_key(config):
    with pytest.raises(ConfigError, match="zero_optimization.stage"):
        config.source_of("zero_optimization.stag")


def test_summary_is_one_line_with_what_is_not_a_default(config):
    line = config.summary_line()
    assert "\n" not in line
    for part in (
        *("batch 8 (user) = micro 4 (derived) x accumulation 1 (default) x 2 ranks", "gradient_clipping 1 (default)"),
        *("bf16.enabled true", "zero_optimization.stage 2", 'optimizer.type "AdamW"', "optimizer.params.lr 0.1"),
        *("unused:", "zero_optimization.stage3_max_live_parameters"),
    ):
        assert part in line, (part, line)
    for part in ("fp16", "reduce_bucket_size", "x-note"):
        assert part not in line, (part, line)


def test_table_shows_value_source_and_effect(config):
    rows = {row.key: row for row in config.rows()}
    assert rows["zero_optimization.stage"][1:] == ("2", "user", "")
    assert rows["zero_optimization.stage3_max_live_parameters"][1:] == ("5", "user", "unused: ZeRO stage 3 only")
    assert "zero_optimization.stage3_max_reuse_distance" not in rows
    assert rows["gradient_clipping"][1:3] == ("1.0", "default")
    everything = {row.key for row in config.rows(everything=True)}
    assert set(rows) < everything and "zero_optimization.stage3_max_reuse_distance" in everything
    assert all(find(key) is not None for key in everything)
    text = config.table()
    assert text.splitlines()[0].split() == ["key", "value", "source"]
    assert "note: x-note is parked" in text


def test_inherent_key_says_why_it_has_no_effect():
    config = load_config({"zero_optimization": {"contiguous_gradients": False}}, world_size=1, batch="skip")
    (row,) = [row for row in config.rows() if row.key.endswith("contiguous_gradients")]
    assert row.value == "false" and row.note.startswith("no effect: gradients always")


def test_lines_are_equal_for_equal_configurations_only(config):
    same = load_config(
        {
            "optimizer": {"params": {"betas": (0.9, "0.99"), "lr": 0.1}, "type": "adamw"},
            **{k: v for k, v in TREE.items() if k != "optimizer"},
        },
        world_size=2,
    )
    assert same.lines() == config.lines()
    other = load_config({**TREE, "seed": 1}, world_size=2)
    assert [pair for pair in zip(config.lines(), other.lines()) if pair[0] != pair[1]] == [("seed = 1234", "seed = 1")]


def test_loss_scale_of_fp16():
    config = load_config({"fp16": {"enabled": True}}, world_size=1, batch="skip")
    assert config.fp16.is_dynamic and config.fp16.initial_scale == 65536.0
    config = load_config({"fp16": {"enabled": True, "loss_scale": 3}}, world_size=1, batch="skip")
    assert not config.fp16.is_dynamic and config.fp16.initial_scale == 3.0
