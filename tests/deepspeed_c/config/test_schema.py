"""The schema has every key of DeepSpeed 0.19.6 and 0.19.8 (known_keys.tsv) at the right depth, and is consistent."""

from pathlib import Path

import msgspec
import pytest

from deepspeed_c.config import load_config, problems_of
from deepspeed_c.config.aliases import OLD_KEYS
from deepspeed_c.config.features import FEATURES
from deepspeed_c.config.keys import Section
from deepspeed_c.config.schema import Root, fields_of, find, walk

# Sections that the list spells otherwise than JSON.
SECTIONS = {
    "top": "", "monitors": "", "quantize_training / timers / misc": "",
    "curriculum_learning (legacy)": "curriculum_learning",
    "weight_quantization (ZeRO-inference)": "weight_quantization",
}  # fmt: skip
# Rows that describe several keys, or describe a key in other words.
ROWS = {
    ("optimizer", "optimizer"): ["optimizer"],
    ("scheduler", "scheduler"): ["scheduler"],
    ("amp", "opt_level etc."): ["amp.opt_level"],
    ("aio", "thread_count (intra_op_parallelism)"): ["aio.thread_count", "aio.intra_op_parallelism"],
    ("inference", "inference.tensor_parallel.tp_size"): ["inference.tensor_parallel.tp_size"],
    ("quantize_training / timers / misc", "pipeline.*"): [
        f"pipeline.{name}"
        for name in [
            *("stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned"),
            *("grad_partitioned", "use_reentrant"),
        ]
    ],
    ("data_efficiency", "data_sampling.curriculum_learning.curriculum_metrics.<m>.schedule_config.*"): [
        f"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.<m>.schedule_config.{name}"
        for name in ["total_curriculum_step", "difficulty_step", "root_degree", "difficulty", "max_step"]
    ],
}


def known_paths():
    lines = (Path(__file__).parent / "known_keys.tsv").read_text().splitlines()
    assert lines[0].split("\t") == ["section", "key", "type", "default"], lines[0]
    for line in lines[1:]:
        section, key, _, _ = line.split("\t")
        prefix = SECTIONS.get(section, section)
        yield from ROWS.get((section, key), [f"{prefix}.{key}".lstrip(".")])


OLD = {key.old for key in OLD_KEYS}


def test_list_is_not_empty():
    assert len(list(known_paths())) > 440


def test_every_known_key_is_in_the_schema():
    missing = [path for path in known_paths() if find(path) is None and path not in OLD]
    assert missing == []


def test_old_names_lead_to_keys_of_the_schema():
    for key in OLD_KEYS:
        assert find(key.old) is None, f"{key.old} is old and in the schema"
        assert key.new is None or find(key.new) is not None, key.new


def test_every_key_says_what_it_means():
    for path, field in walk():
        assert field.info.doc.endswith("."), (path, field.info.doc)


def test_every_feature_is_used_and_says_what_to_do():
    used = {field.info.feature for _, field in walk()}
    from deepspeed_c.config.optim import OPTIMIZERS
    from deepspeed_c.config.schedule import SCHEDULES

    used |= {kind.feature for kind in (*OPTIMIZERS.values(), *SCHEDULES.values())}
    assert set(FEATURES) == used - {None}
    assert all(feature.instead and feature.title for feature in FEATURES.values())


def test_defaults_have_the_type_of_their_key():
    for path, field in walk():
        if field.section is None and field.default is not msgspec.NODEFAULT and not isinstance(field.default, dict):
            assert msgspec.convert(field.default, field.hint) == field.default, path


def test_every_default_may_be_written_out():
    """A file with all defaults is accepted, and means the same as an empty one."""

    def written(cls):
        tree = {}
        for field in fields_of(cls).values():
            if isinstance(field.default, Section):
                tree[field.name] = written(field.section)
            elif field.default is not msgspec.NODEFAULT:
                tree[field.name] = field.default
        return tree

    tree = written(Root)
    assert problems_of(tree, batch="skip") == []
    full = load_config(tree, world_size=1, batch="skip")
    empty = load_config({}, world_size=1, batch="skip")
    assert full.lines() == empty.lines()


@pytest.mark.parametrize(
    "path", ["", "nothing", "fp16.nothing", "fp16.enabled.deeper", "optimizer.params.lr.deeper", "fp16."]
)
def test_find_returns_none_for_what_is_not_there(path):
    assert find(path) is None


def test_find_looks_into_containers():
    assert find("tensor_parallel.partition_config.layer_specs[0].shape").name == "shape"
    assert find("compression_training.row_pruning.different_groups.any-name.params.dense_ratio").name == "dense_ratio"
