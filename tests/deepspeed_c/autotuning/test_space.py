"""The candidates that a configuration describes."""

from __future__ import annotations

import copy

import pytest

from deepspeed_c.autotuning.space import MICRO_BATCH, make_space, spread
from deepspeed_c.config import load_config
from deepspeed_c.errors import ConfigError


def batches(config, n_ranks=1, **section):
    space = make_space({**config, "autotuning": section}, n_ranks, has_accelerator=False)
    return [(c.config[MICRO_BATCH], c.config["gradient_accumulation_steps"]) for c in space.candidates]


@pytest.mark.parametrize(
    ("config", "n_ranks", "section", "expected"),
    [
        ({}, 1, {"max_train_micro_batch_size_per_gpu": 4}, [(1, 1), (2, 1), (4, 1)]),
        ({}, 1, {"max_train_micro_batch_size_per_gpu": 7}, [(1, 1), (2, 1), (4, 1)]),
        ({}, 1, {"min_train_micro_batch_size_per_gpu": 3, "max_train_micro_batch_size_per_gpu": 6}, [(3, 1), (6, 1)]),
        # The steps of the configuration stay, or its global batch, or the global batch goes to the largest.
        ({"gradient_accumulation_steps": 5}, 3, {"max_train_micro_batch_size_per_gpu": 2}, [(1, 5), (2, 5)]),
        ({"train_batch_size": 12}, 3, {}, [(1, 4), (2, 2), (4, 1)]),
        ({"train_batch_size": 12}, 3, {"max_train_batch_size": 25}, [(1, 8), (2, 4), (4, 2), (8, 1)]),
        ({}, 2, {"max_train_batch_size": 8, "mp_size": 2}, [(1, 8), (2, 4), (4, 2), (8, 1)]),
        ({}, 2, {"max_train_micro_batch_size_per_gpu": 8, "min_train_batch_size": 5}, [(4, 1), (8, 1)]),
        ({MICRO_BATCH: [5, 3, 3]}, 1, {}, [(3, 1), (5, 1)]),
        ({MICRO_BATCH: 7}, 1, {"max_train_micro_batch_size_per_gpu": 1}, [(1, 1)]),
        ({MICRO_BATCH: "auto", "train_batch_size": "auto"}, 1, {"max_train_micro_batch_size_per_gpu": 1}, [(1, 1)]),
        ({MICRO_BATCH: [2], "gradient_accumulation_steps": "auto"}, 1, {}, [(2, "auto")]),
        ({MICRO_BATCH: [2], "gradient_accumulation_steps": "auto"}, 1, {"max_train_batch_size": 7}, [(2, 3)]),
        ({MICRO_BATCH: [2], "gradient_accumulation_steps": [1, 3]}, 1, {}, [(2, 1), (2, 3)]),
    ],
)
def test_batch_sizes(config, n_ranks, section, expected):
    assert batches(config, n_ranks, **section) == expected


def test_sizes_of_tensor_parallel_groups():
    """A listed size, or with a section that has none the divisors of the ranks; each has its own number of copies."""
    config = {"train_batch_size": 8, "tensor_parallel": {"autotp_size": [1, 2, 3, 4]}}
    space = make_space({**config, "autotuning": {"max_train_micro_batch_size_per_gpu": 2}}, 4, has_accelerator=False)
    found = {
        (c.config["tensor_parallel"]["autotp_size"], c.micro_batch, c.config["gradient_accumulation_steps"])
        for c in space.candidates
    }
    assert found == {(1, 1, 2), (1, 2, 1), (2, 1, 4), (2, 2, 2), (4, 1, 8), (4, 2, 4)}  # 3 does not divide 4 ranks
    whole = {"tensor_parallel": {"preset_model": "llama"}, "autotuning": {"fast": False}}
    space = make_space(whole, 6, has_accelerator=False)
    assert {c.choices["tensor_parallel.autotp_size"] for c in space.candidates} == {1, 2, 3, 6}


def test_keys_that_are_auto_are_told_beside_the_mappings():
    auto = {MICRO_BATCH: "auto", "train_batch_size": "auto", "gradient_accumulation_steps": 3}
    section = {"arg_mappings": {MICRO_BATCH: "--bs", "lr": "--lr"}}
    space = make_space({**auto, "autotuning": section}, 1, has_accelerator=False)
    assert space.autos == {MICRO_BATCH, "train_batch_size"} and space.mappings == section["arg_mappings"]
    plain = make_space({}, 1, has_accelerator=False)
    assert plain.autos == frozenset() and not plain.mappings


@pytest.mark.parametrize(
    ("config", "n_ranks", "section"),
    [
        ({"train_batch_size": 7}, 2, {}),
        ({}, 8, {"max_train_batch_size": 7}),
        ({}, 1, {"max_train_micro_batch_size_per_gpu": 2, "min_train_batch_size": 3}),
        ({"zero_optimization": {"stage": []}}, 1, {}),
        ({"zero_optimization": {"stage": [1, 7]}}, 1, {}),
        ({"bf16": {"enabled": [True, "maybe"]}}, 1, {}),
        ({"autotuning": 3}, 1, None),
        ({"zero_optimization": {"stge": 1}}, 1, {}),
    ],
)
def test_empty_space_is_a_typed_error(config, n_ranks, section):
    with pytest.raises(ConfigError) as caught:
        tuning = {} if section is None else {"autotuning": section}
        make_space({**config, **tuning}, n_ranks, has_accelerator=False)
    assert caught.value.where and caught.value.fix


RANGED = {
    MICRO_BATCH: 2,
    "zero_optimization": {"stage": [1, 2], "reduce_bucket_size": [500, 70000]},
    "optimizer": {"type": "AdamW", "params": {"lr": [1e-3, 1e-4], "betas": [0.9, 0.95]}},
    "bf16": {"enabled": [True, False]},
}


def test_lists_are_ranges_where_a_key_takes_no_list():
    before = copy.deepcopy(RANGED)
    section = {"max_train_micro_batch_size_per_gpu": 1}
    space = make_space({**RANGED, "autotuning": section}, 2, has_accelerator=True)
    assert before == RANGED
    assert len(space.candidates) == 2 * 2 * 2 * 2 and len({c.name for c in space.candidates}) == 16
    assert len({c.group for c in space.candidates}) == 16
    for candidate in space.candidates:
        config = load_config(candidate.config, world_size=2)
        assert config.optimizer.params["betas"] in ((0.9, 0.95), [0.9, 0.95])
        assert config.autotuning.enabled and config.zero.stage == candidate.choices["zero_optimization.stage"]
        assert set(candidate.choices) >= {"optimizer.params.lr", "bf16.enabled", MICRO_BATCH}


def test_whole_space():
    plain = {MICRO_BATCH: [1]}
    fast = make_space(plain, 2, has_accelerator=True).candidates
    assert [c.name for c in fast] == ["z0_gas1_tmbspg1"]
    whole = make_space({**plain, "autotuning": {"fast": False}}, 2, has_accelerator=True).candidates
    # Stages 1 to 3 with and without offload, stage 0 without; two sizes of two buckets; layers kept or recomputed.
    assert len(whole) == (3 * 2 + 1) * 4 * 2 and len({c.name for c in whole}) == len(whole)
    on_host = make_space({**plain, "autotuning": {"fast": False}}, 2, has_accelerator=False).candidates
    assert len(on_host) == 4 * 4 * 2
    for every in ("all", ["all"]):
        asked = {**plain, "zero_optimization": {"stage": every}}
        assert [
            c.choices["zero_optimization.stage"] for c in make_space(asked, 2, has_accelerator=True).candidates
        ] == [0, 1, 2, 3]
    fixed = {"stage": 2, "reduce_bucket_size": 5, "allgather_bucket_size": 5, "offload_optimizer": {"device": "none"}}
    of_user = {**plain, "zero_optimization": fixed, "activation_checkpointing": {"layers": None}}
    assert len(make_space({**of_user, "autotuning": {"fast": False}}, 2, has_accelerator=True).candidates) == 1


@pytest.mark.parametrize(
    ("n", "expected"), [(1, [11]), (2, [1, 11]), (3, [1, 5, 11]), (5, [1, 2, 5, 7, 11]), (9, [1, 2, 5, 7, 11])]
)
def test_spread(n, expected):
    assert spread([1, 2, 5, 7, 11], n) == expected
    assert spread([], n) == []
