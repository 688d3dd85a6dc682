"""Reading a configuration: "auto", keys with dots, parked keys ("x-..."), old names, overrides and sources. The input
is not changed."""

import copy
from pathlib import Path

import pytest

from deepspeed_c.config import load_config, problems_of
from deepspeed_c.config.aliases import OLD_KEYS
from deepspeed_c.config.optim import OPTIMIZERS
from deepspeed_c.config.schedule import SCHEDULES
from deepspeed_c.config.schema import fields_of, find, walk
from deepspeed_c.errors import BatchSizeError, ConfigError, UnsupportedConfigError

# The configuration in the documentation of the Hugging Face Trainer.
HF = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "steps_per_print": float("inf"), "zero_allow_untested_optimizer": True,
    "fp16": {
        "enabled": "auto", "auto_cast": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": "auto", "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
        "offload_param": {"device": "auto", "nvme_path": "auto"}, "overlap_comm": True, "contiguous_gradients": True,
        "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "msamp": {"enabled": False, "opt_level": "O1"}, "checkpoint": {"use_node_local_storage": False},
    "wall_clock_breakdown": False,
}  # fmt: skip
# Values that the Trainer and accelerate fill in. The reader has to find the other ones.
FILLED = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
    "fp16.enabled": False, "bf16.enabled": True,
    "optimizer.params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "scheduler.params.warmup_min_lr": 0, "scheduler.params.warmup_max_lr": 5e-5, "scheduler.params.warmup_num_steps": 1,
    "scheduler.params.total_num_steps": 100, "zero_optimization.stage": 2,
    "zero_optimization.offload_optimizer": {"device": "none", "nvme_path": None},
    "zero_optimization.offload_param": {"device": "none", "nvme_path": None},
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
}  # fmt: skip
OURS = {
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
}


def autos(tree, path=""):
    """The paths with the value "auto"."""
    found = set()
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= autos(value, f"{path}{name}.")
        elif value == "auto":
            found.add(path + name)
    return found


def named_in(problem):
    """The keys that the error about "auto" lists. Each has a line with its fix."""
    return {line.split(":")[0].strip() for line in problem.fix.splitlines()[1:]}


def test_a_filled_configuration_of_hugging_face_is_accepted():
    config = load_config(HF, world_size=2, overrides=FILLED)
    assert config.batch == (8, 4, 1, 2) and config.unfilled == ()
    assert dict(config.optimizer.params) == {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert config.scheduler.params["total_num_steps"] == 100
    zero = config.zero
    found = zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size, zero.stage3_param_persistence_threshold
    assert found == (500_000_000, 50_000_000, 100_000)
    for path in OURS:
        assert config.source_of(path) == "auto", path
        assert [path, "auto"] == [
            row.split()[i] for row in config.table().splitlines() if row.startswith(path) for i in (0, 2)
        ]
    assert config.source_of("train_batch_size") == "derived"
    assert config.source_of("train_micro_batch_size_per_gpu") == "override"
    assert config.source_of("scheduler.params.total_num_steps") == "override"


def test_every_auto_that_nobody_filled_is_named_in_one_error():
    (problem,) = problems_of(HF, world_size=2)
    assert named_in(problem) == autos(HF) - OURS, str(problem)
    for text in (
        "TrainingArguments",
        "DeepSpeedPlugin",
        "zero_optimization.stage: one of 0, 1, 2, 3 (without the key: 0)",
    ):
        assert text in str(problem), str(problem)
    assert "scheduler.params.total_num_steps: an integer > 0\n" in str(problem)  # the key has no default
    (problem,) = problems_of({"fp16": {"enabled": "auto"}, "train_batch_size": 1})
    assert problem.where == "fp16.enabled" and named_in(problem) == {"fp16.enabled"}


@pytest.mark.parametrize("missing", sorted(autos(HF) - OURS - {"train_batch_size"}))
def test_each_of_them_alone_is_an_error(missing):
    section, _, name = missing.rpartition(".")
    filled = copy.deepcopy(FILLED)
    if section in filled:
        filled[section].pop(name)
    else:
        del filled[missing]
    (problem,) = problems_of(HF, world_size=2, overrides=filled)
    # If two batch sizes are unknown, neither can be computed.
    assert named_in(problem) - {"train_batch_size"} == {missing}, str(problem)


@pytest.mark.parametrize(
    "train, micro, steps, left",
    [
        (8, "auto", 2, set()), (8, 2, "auto", set()), ("auto", 2, 2, set()), ("auto", 2, None, set()),
        (8, "auto", None, set()), (8, "auto", "auto", {"gradient_accumulation_steps"}),
        ("auto", 2, "auto", {"gradient_accumulation_steps"}), (None, 2, "auto", {"gradient_accumulation_steps"}),
        ("auto", "auto", 2, {"train_batch_size", "train_micro_batch_size_per_gpu"}),
        (None, "auto", 2, {"train_micro_batch_size_per_gpu"}),
        ("auto", None, "auto", {"train_batch_size", "gradient_accumulation_steps"}),
    ],
)  # fmt: skip
def test_auto_of_a_batch_size_is_what_the_others_make_it(train, micro, steps, left):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    tree = {name: value for name, value in zip(names, (train, micro, steps)) if value is not None}
    problems = problems_of(tree, world_size=2)
    assert set().union(*map(named_in, problems)) == left and len(problems) == bool(left), problems
    if left:
        assert not any(isinstance(problem, BatchSizeError) for problem in problems)
    else:
        config = load_config(tree, world_size=2)
        assert config.batch.train_batch_size == config.batch.micro_batch_size * config.batch.accumulation_steps * 2
        assert all(config.source_of(name) == "derived" for name in autos(tree))


def test_auto_accumulation_without_any_size_is_two_problems():
    problems = problems_of({"gradient_accumulation_steps": "auto"}, world_size=2)
    assert sorted(problem.where for problem in problems) == [
        "gradient_accumulation_steps",
        "train_batch_size, train_micro_batch_size_per_gpu",
    ]


def test_skip_leaves_it_to_the_caller_to_fill():
    config = load_config(HF, world_size=1, batch="skip")
    assert config.batch is None and config.train_batch_size is None
    assert "total_num_steps" not in config.scheduler.params
    assert set(config.unfilled) == autos(HF) - OURS
    for path in autos(HF):
        assert config.source_of(path) == "auto", path
    (note,) = (note for note in config.notes if "auto" in note)
    assert all(path in note for path in config.unfilled), note


def with_auto_at(path):
    """A configuration with only this key, whose value is "auto"."""
    tree = place = {}
    *sections, last = path.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = "auto"
    if path.startswith(("optimizer.params.", "scheduler.params.")):
        kinds = (kind for kind in (*OPTIMIZERS.values(), *SCHEDULES.values()) if kind.params is not None)
        tree[sections[0]]["type"] = next(kind.name for kind in kinds if last in fields_of(kind.params))
    return tree


# The sections in which DeepSpeed treats a key with "auto" as absent: those that are pydantic models.
DROPPED = (
    *("zero_optimization.", "fp16.", "bf16.", "tensor_parallel.", "hybrid_engine.", "compile.", "comms_logger."),
    *("timers.throughput.", "tensorboard.", "wandb.", "csv_monitor.", "comet."),
)
UNFILLABLE = [path for path, field in walk() if not field.info.auto and "<" not in path and "[" not in path]


def test_auto_elsewhere_is_an_error():
    paths = [path for path in UNFILLABLE if not path.startswith(DROPPED)]
    assert len(paths) > 250
    for path in paths:
        problems = problems_of(with_auto_at(path), batch="skip")
        # A key that accepts any text still refuses "auto", unless it is a `.type`.
        assert [p for p in problems if p.where == path and "auto" in p.what] or path.endswith(".type"), (path, problems)


def test_auto_where_deepspeed_takes_its_default_is_a_note():
    paths = [path for path in UNFILLABLE if path.startswith(DROPPED)]
    assert {
        "zero_optimization.sub_group_size",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.offload_param.buffer_size",
    } <= set(paths)
    for path in paths:
        tree = with_auto_at(path)
        if "zenflow." in path or "zeropp_loco_param." in path:
            tree["zero_optimization"]["stage"] = 0
            where = ".".join(path.split(".")[:2])  # any key of the section asks for its feature
            assert [problem.where for problem in problems_of(tree, batch="skip")] == [where], path
            continue
        config = load_config(tree, world_size=1, batch="skip")
        parts = path.split(".")
        sections = [".".join(parts[:n]) for n in range(1, len(parts))]
        # The outermost section of a missing feature on the path. It has only this key.
        off = [section for section in sections if not find(section).info.is_built][:1]
        assert [note.split(" ")[0] for note in config.notes] == [path, *off], (path, config.notes)
        assert config.source_of(path) == ("derived" if path == "zero_optimization.overlap_comm" else "auto")
        place = tree
        for section in path.split(".")[:-1]:
            place = place[section]
        place.clear()
        assert config.lines() == load_config(tree, world_size=1, batch="skip").lines(), path


def test_what_is_inert_in_deepspeed_is_noted_and_stands_in_the_table():
    tree = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 2, "offload_param": {"device": "nvme", "pin_memory": True}},
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
        "compression_training": {"channel_pruning": {"different_groups": {"a": {"modules": ["conv"]}}}},
        "log": {"anything": 1}, "monitor_config": {"stage": 3}, "_comment": "ours", "comment": "theirs",
        "// end": "of the file. Really", "fp16": {"_why": "not", "comment_2": 1},
    }  # fmt: skip
    config = load_config(tree, world_size=2)
    device = "zero_optimization.offload_param.device"
    noted = [device]
    others = ["log", "monitor_config", "_comment", "comment", "// end", "fp16._why", "fp16.comment_2"]
    others.append("compression_training.channel_pruning")
    for path in (*noted, *others):
        assert len([note for note in config.notes if note.startswith(f"{path} ")]) == 1, (path, config.notes)
    assert len(config.notes) == len(noted) + len(others)
    assert config.zero.offload_param.device == "none"
    rows = {row.key: row for row in config.rows()}
    assert all(rows[path].note.startswith("no effect: ") for path in noted), [rows[path] for path in noted]
    assert "ZeRO stage 2" in rows[device].note and rows[device].source == "user"
    assert all(f"note: {note}" in config.table() for note in config.notes)


def test_offload_param_acts_where_the_stage_may_still_become_3():
    tree = {"zero_optimization": {"stage": "auto", "offload_param": {"device": "cpu"}}}
    config = load_config(tree, world_size=1, batch="skip")
    assert config.zero.offload_param.device == "cpu" and not any("no effect" in note for note in config.notes)
    config = load_config(tree, world_size=1, batch="skip", overrides={"zero_optimization.stage": 3})
    assert config.zero.offload_param.device == "cpu" and config.notes == ()


def test_strict_makes_every_note_an_error():
    tree = {
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 1, "sub_group_size": "auto", "offload_param": {"device": "cpu"}},
        "allgather_size": 5, "zero_optimization.stage": 2, "log": 1, "x-old": 1, "_": 1,
    }  # fmt: skip
    notes = load_config(tree, world_size=1, batch="skip").notes
    assert len(notes) == 8
    problems = problems_of({**tree, "strict": True}, batch="skip")
    assert [f"{problem.where} {problem.what}" for problem in problems] == list(notes)
    assert problems_of({"strict": True, "fp16": {"enabled": "auto"}}, batch="skip") == []  # "auto" may be filled later
    assert problems_of({**tree, "strict": False}, batch="skip") == []


def test_auto_of_parameters_of_a_torch_optimizer():
    tree = {"train_batch_size": 1, "optimizer": {"type": "RMSprop", "params": {"lr": "auto", "alpha": "auto"}}}
    unknown, unfilled = problems_of(tree)
    assert unknown.where == "optimizer.params.alpha" and unfilled.where == "optimizer.params.lr"


@pytest.mark.parametrize("key", ["select_interval", "update_interval", "select_strategy"])
def test_auto_that_is_a_value_stays_one(key):
    problems = problems_of({"zero_optimization": {"zenflow": {key: "auto", "topk_ratio": 0.5}}}, batch="skip")
    assert [problem.where for problem in problems] == ["zero_optimization.zenflow"]


OLD_FORMS = {
    "zero_optimization": {"stage": 1, "cpu_offload": False, "prefetch_bucket_size": 3},
    "zero_optimization.reduce_bucket_size": 921.6, "bfloat16": {"enabled": True}, "x-old": {"anything": [1, {"b": 2}]},
    "fp16.loss_scale": 2, "train_batch_size": 2, "allgather_size": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    "source, overrides", [(HF, FILLED), (OLD_FORMS, {"optimizer": {"type": "SGD", "params": {"lr": 1}}})]
)
def test_input_is_never_changed(source, overrides):
    before, overrides_before = copy.deepcopy(source), copy.deepcopy(overrides)
    config = load_config(source, world_size=1, overrides=overrides)
    assert source == before and overrides == overrides_before
    assert config.as_dict() == before
    config.as_dict()["train_batch_size"] = 0
    config.resolved_dict()["zero_optimization"]["stage"] = 9
    assert config.as_dict() == before and config.zero.stage != 9


def test_dotted_key_means_its_place_and_wins():
    nested = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 7}}
    config = load_config({**nested, "zero_optimization.reduce_bucket_size": 1024.0}, world_size=1, batch="skip")
    assert (config.zero.stage, config.zero.reduce_bucket_size) == (1, 1024)
    assert any("1024" in note and "7" in note for note in config.notes)
    alone = load_config({"zero_optimization.offload_param.buffer_count": 3}, world_size=1, batch="skip")
    assert alone.zero.offload_param.buffer_count == 3
    equal = load_config({**nested, "zero_optimization.reduce_bucket_size": 7}, world_size=1, batch="skip")
    assert equal.notes == ()


def test_what_trl_writes_at_stage_3_is_read():
    hidden = 32
    keys = {
        "zero_optimization.reduce_bucket_size": hidden * hidden,
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden,
        "zero_optimization.stage3_prefetch_bucket_size": 0.9 * hidden * hidden,
    }
    config = load_config({"zero_optimization": {"stage": 2}, **keys}, world_size=1, batch="skip")
    assert config.zero.stage3_prefetch_bucket_size == 921


@pytest.mark.parametrize(
    "tree",
    [{"fp16": 1, "fp16.enabled": True}, {"zero.b": 1}, {".": 1}, {"fp16.": 1}, {".fp16": {}}, {"fp16..enabled": 1}],
)
def test_dotted_key_that_leads_nowhere(tree):
    assert problems_of(tree, batch="skip")


def test_parked_keys_are_ignored_at_every_depth_and_reported():
    tree = {
        "x-zero_optimization": {"stage": 77},
        "x-a.b": object(),
        "zero_optimization": {"x-stage": 3, "stage": 1, "offload_param": {"x-device": "moon"}},
        "optimizer": {"type": "AdamW", "params": {"x-lr": "fast"}, "x-type": 1},
    }
    config = load_config(tree, world_size=1, batch="skip")
    assert config.zero.stage == 1 and config.optimizer.params == {}
    for name in (
        "x-zero_optimization",
        "x-a.b",
        "zero_optimization.x-stage",
        "optimizer.params.x-lr",
        "optimizer.x-type",
    ):
        assert any(note.startswith(name) for note in config.notes), (name, config.notes)


def some_value(key):
    """A value of the old key that is not the default."""
    if key.convert is not None or key.new is None:
        return False
    field = find(key.new)
    if field.section is not None:
        return {}
    return {bool: not field.default, int: 3, type(None): "somewhere"}[type(field.default)]


@pytest.mark.parametrize("key", OLD_KEYS, ids=lambda key: key.old)
def test_old_name_is_read_as_the_new_one(key):
    value = some_value(key)
    tree = {}
    place = tree
    *sections, last = key.old.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = value
    config = load_config(tree, world_size=1, batch="skip")
    assert any(note.startswith(key.old) for note in config.notes)
    if key.new is not None and key.convert is None and not isinstance(value, dict):
        result = config.resolved_dict()
        for part in key.new.split("."):
            result = result[part]
        assert result == value
        assert config.source_of(key.new) == "user"


def test_old_and_new_name_together():
    tree = {"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}
    (problem,) = problems_of(tree, batch="skip")
    assert problem.where == "bfloat16" and "bf16" in problem.what
    same = {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}
    assert load_config(same, world_size=1, batch="skip").bf16.enabled


def test_error_under_an_old_name_says_how_it_was_spelt():
    (problem,) = problems_of({"bfloat16": {"enabled": 7}}, batch="skip")
    assert problem.where == "bf16.enabled (given as bfloat16)"
    (problem,) = problems_of({"zero_optimization": {"stage": 1, "zero_quantized_weights": True}}, batch="skip")
    assert isinstance(problem, UnsupportedConfigError)
    (problem,) = problems_of({"zero_optimization": {"cpu_offload": True}}, batch="skip")  # the stage is 0
    assert problem.where.startswith("zero_optimization.offload_optimizer.device")
    (problem,) = problems_of({"zero_optimization": {"cpu_offload": "maybe"}}, batch="skip")
    assert "given as zero_optimization.cpu_offload" in problem.where


@pytest.mark.parametrize("switch, stage", [(True, 1), (False, 0)])
def test_zero_as_a_switch(switch, stage):
    config = load_config({"zero_optimization": switch, "allgather_size": 9}, world_size=1, batch="skip")
    assert (config.zero.stage, config.zero.allgather_bucket_size) == (stage, 9)


def test_null_section_is_absent_and_null_value_is_not():
    tree = {name: None for name in ("fp16", "optimizer", "scheduler", "zero_optimization", "aio", "amp")}
    config = load_config(tree, world_size=1, batch="skip")
    assert config.optimizer is None and config.zero.stage == 0
    (problem,) = problems_of({"gradient_clipping": None}, batch="skip")
    assert problem.where == "gradient_clipping"


def test_overrides_replace_and_are_marked():
    tree = {"optimizer": {"type": "AdamW", "params": {"lr": 1, "eps": 1e-6}}, "seed": 5}
    config = load_config(
        tree, world_size=1, batch="skip", overrides={"optimizer": {"params": {"lr": 2}}, "bf16.enabled": True}
    )
    assert config.optimizer.params == {"lr": 2.0, "eps": 1e-6}
    sources = {
        path: config.source_of(path)
        for path in ("optimizer.params.lr", "optimizer.params.eps", "bf16.enabled", "seed", "fp16.enabled")
    }
    assert sources == {
        "optimizer.params.lr": "override", "optimizer.params.eps": "user", "bf16.enabled": "override", "seed": "user",
        "fp16.enabled": "default",
    }  # fmt: skip
    assert config.as_dict() == tree


def test_all_problems_are_reported_in_one_error():
    tree = {"fp16": {"enabeld": 1}, "zero_optimization": {"stage": 7}, "train_batch_size": "many", "seed": "auto"}
    with pytest.raises(ConfigError) as error:
        load_config(tree, world_size=1)
    for text in ("4 problems", "fp16.enabled?", "zero_optimization.stage", '"many"', "seed"):
        assert text in str(error.value), (text, str(error.value))
    assert type(error.value) is ConfigError
    assert len(problems_of(tree)) == 4


def test_type_of_the_error_is_kept_when_all_problems_share_it():
    with pytest.raises(UnsupportedConfigError):
        load_config({"nebula": {"enabled": True}, "amp": {"enabled": True}}, world_size=1, batch="skip")
    with pytest.raises(BatchSizeError):
        load_config({}, world_size=1)


@pytest.mark.parametrize("world_size", [0, -1, 1.5, "2", None, True])
def test_world_size_must_be_a_number_of_ranks(world_size):
    with pytest.raises(ConfigError, match="world_size"):
        load_config({"train_batch_size": 1}, world_size=world_size)


def test_unknown_batch_mode():
    with pytest.raises(ConfigError, match="batch"):
        load_config({}, world_size=1, batch="later")


def test_dict_that_contains_itself():
    tree = {"fp16": {}}
    tree["fp16"]["fp16"] = tree
    with pytest.raises(ConfigError, match="deep"):
        load_config(tree, world_size=1)


def test_keys_must_be_strings():
    with pytest.raises(ConfigError, match="1"):
        load_config({1: 2}, world_size=1)
    with pytest.raises(ConfigError, match="None"):
        load_config({"fp16": {None: 2}}, world_size=1)


def test_sections_in_containers():
    tree = {
        "tensor_parallel": {
            "partition_config": {"layer_specs": [{"patterns": ["a"], "shape": [[1, 2], -1]}, {"partition_type": "ROW"}]}
        },
        "compression_training": {
            "row_pruning": {"different_groups": {"a.b": {"params": {"dense_ratio": "0.5"}, "modules": "m"}}}
        },
    }
    config = load_config(tree, world_size=1, batch="skip")
    specs = config.tensor_parallel.partition_config.layer_specs
    assert specs[0].shape == ((1, 2), -1) and specs[1].partition_type == "row"
    group = config.compression_training.row_pruning.different_groups["a.b"]
    assert group.params.dense_ratio == 0.5 and group.modules == ("m",)
    assert config.source_of("tensor_parallel.partition_config.layer_specs[0].shape") == "user"
    bad = {"tensor_parallel": {"partition_config": {"layer_specs": [{}, 3]}}}
    (problem,) = problems_of(bad, batch="skip")
    assert problem.where == "tensor_parallel.partition_config.layer_specs[1]"
    (problem,) = problems_of({"tensor_parallel": {"partition_config": {"layer_specs": {}}}}, batch="skip")
    assert problem.where == "tensor_parallel.partition_config.layer_specs"
    (problem,) = problems_of({"compression_training": {"row_pruning": {"different_groups": [1]}}}, batch="skip")
    assert problem.where == "compression_training.row_pruning.different_groups"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_overlap_comm_follows_from_the_stage(stage):
    config = load_config({"zero_optimization": {"stage": stage}}, world_size=1, batch="skip")
    assert config.zero.overlap_comm is False
    assert config.source_of("zero_optimization.overlap_comm") == "derived"
    config = load_config({"zero_optimization": {"overlap_comm": True}}, world_size=1, batch="skip")
    assert config.zero.overlap_comm and config.source_of("zero_optimization.overlap_comm") == "user"


def test_file_and_dict_give_the_same(tmp_path: Path):
    import json

    path = tmp_path / "c.json"
    path.write_text(json.dumps({**HF, "steps_per_print": 10}))
    from_file = load_config(path, world_size=2, overrides=FILLED)
    from_dict = load_config({**HF, "steps_per_print": 10}, world_size=2, overrides=FILLED)
    assert from_file.lines() == from_dict.lines()
    assert (from_file.origin, from_dict.origin) == (str(path), "dict")
