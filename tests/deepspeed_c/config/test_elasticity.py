"""The section elasticity: its numbers against DeepSpeed 0.19.6 and brute force, its errors, and the batch of a
configuration."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch

import deepspeed_c
from deepspeed_c.compat.ds_config import DeepSpeedConfig
from deepspeed_c.config import elasticity, load_config
from deepspeed_c.config.elasticity import (
    ElasticityConfig,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
    get_best_candidates,
    get_candidate_batch_sizes,
    get_valid_gpus,
)
from deepspeed_c.config.load import problems_of
from deepspeed_c.errors import (
    ConfigError,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from deepspeed_c.launcher import main as command
from tests import fresh
from tests.ranks import on_ranks

TABLE = json.loads(Path(__file__).with_name("elasticity_of_deepspeed_0_19_6.json").read_text())
VERSION = "0.19.6"
SECTION = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 3], "version": 0.1}
SEEN = "DEEPSPEED_ELASTICITY_CONFIG"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("WORLD_SIZE", SEEN):
        monkeypatch.delenv(name, raising=False)


def outcome(section, world_size=0, return_microbatch=False):
    """The answer as a list, or None where it is refused."""
    try:
        return [*compute_elastic_config({"elasticity": section}, VERSION, world_size, return_microbatch)]
    except ConfigError as error:
        assert error.what and error.where and error.fix, error
        return None


def test_numbers_of_deepspeed(monkeypatch):
    assert len(TABLE) == 400
    n_answers = n_refused = 0
    for section, lists, calls in TABLE:
        for world_size, of_environment, return_microbatch, theirs in calls:
            if of_environment is None:
                monkeypatch.delenv("WORLD_SIZE", raising=False)
            else:
                monkeypatch.setenv("WORLD_SIZE", str(of_environment))
            expected = None if theirs is None else [theirs[0], lists[theirs[1]], *theirs[2:]]
            found = outcome(section, world_size, return_microbatch)
            assert found == expected, (section, world_size, of_environment, return_microbatch, found, expected)
            n_answers, n_refused = n_answers + (found is not None), n_refused + (found is None)
    print(n_answers, "answers,", n_refused, "refused")
    assert n_answers > 1000 and n_refused > 1000


def test_table_of_highly_composite_numbers():
    limit = 720_721
    divisors = torch.zeros(limit, dtype=torch.int32)
    for i in range(1, math.isqrt(limit) + 1):  # pairs of divisors, by the smaller one
        divisors[i * i] += 1
        divisors[i * i + i :: i] += 2
    records = torch.cummax(divisors, 0).values
    expected = [n for n in range(1, limit) if divisors[n] > records[n - 1]]
    assert list(elasticity._HIGHLY_COMPOSITE) == expected


def test_valid_numbers_of_ranks_by_brute_force():
    draw = random.Random(1)
    for _ in range(300):
        batch = draw.choice((1, 2, 97, 360, draw.randint(1, 700)))
        sizes = [draw.randint(1, 12) for _ in range(draw.randint(1, 4))]
        least, most = draw.randint(1, 9), draw.randint(0, 400)
        expected = [n for n in range(least, most + 1) if any(batch % (n * size) == 0 for size in sizes)]
        found = get_valid_gpus(batch, sizes, least, most)
        assert found == expected, (batch, sizes, least, most, found, expected)


@pytest.mark.parametrize("prefer_larger", [True, False])
def test_candidates_by_brute_force(prefer_larger):
    draw = random.Random(2)
    for _ in range(200):
        bases = [draw.choice((1, 2, 7, 31, draw.randint(1, 50))) for _ in range(draw.randint(1, 5))]
        most = draw.choice((1, 2, 30, 31, draw.randint(1, 900)))
        fitting = {base: [n * base for n in elasticity._HIGHLY_COMPOSITE if n * base <= most] for base in bases}
        expected = sorted({sizes[-1] if base != most else base for base, sizes in fitting.items() if sizes})
        found = get_candidate_batch_sizes(bases, most)
        assert found == expected, (bases, most, found, expected)
        if not found:
            continue
        best, numbers = get_best_candidates(draw.sample(found, len(found)), bases, 1, 10_000, prefer_larger)
        counts = {size: len(get_valid_gpus(size, bases, 1, 10_000)) for size in found}
        sign = 1 if prefer_larger else -1
        wanted = max(found, key=lambda size: (counts[size], sign * size))
        assert (best, numbers) == (wanted, get_valid_gpus(wanted, bases, 1, 10_000)), (bases, most, best, wanted)


def test_hard_sizes():
    one = {"enabled": True, "max_train_batch_size": 1, "micro_batch_sizes": [1], "version": 0.1}
    assert compute_elastic_config({"elasticity": one}, VERSION) == (1, [1])
    assert compute_elastic_config({"elasticity": {**one, "version": 0.2}}, VERSION, 1) == (1, [1], 1)
    prime = {**one, "max_train_batch_size": 97, "micro_batch_sizes": [97]}
    assert compute_elastic_config({"elasticity": prime}, VERSION) == (97, [1])
    assert get_candidate_batch_sizes([1], 10**9) == [720_720]
    assert get_candidate_batch_sizes([], 5) == [] and get_candidate_batch_sizes([9], 5) == []
    assert get_valid_gpus(12, [], 1, 9) == [] and get_valid_gpus(12, [5], 1, 9) == []
    assert get_best_candidates([], [3, 2], 1, 9, True) == (2, None)
    # No number of ranks within the limits: as in DeepSpeed an empty list, or None where the smaller batch is preferred.
    far = {**SECTION, "min_gpus": 5000, "max_gpus": 6000}
    assert compute_elastic_config({"elasticity": far}, VERSION) == (96, [])
    assert compute_elastic_config({"elasticity": {**far, "prefer_larger_batch": False}}, VERSION) == (2, None)


def with_section(**changes):
    return {"elasticity": {**SECTION, **changes}}


@pytest.mark.parametrize(
    ("config", "kind", "where", "text"),
    [
        ([SECTION], ElasticityConfigError, "compute_elastic_config", "not a dictionary"),
        ({}, ElasticityConfigError, "elasticity", "missing"),
        (with_section(enabled=False), ElasticityConfigError, "elasticity.enabled", "false"),
        ({"elasticity": {"enabled": True}}, ElasticityConfigError, "elasticity.max_train_batch_size", "missing"),
        (with_section(micro_batch_sizes=[200]), ElasticityConfigError, "elasticity.micro_batch_sizes", "200"),
        (with_section(micro_batch_sizes=[]), ElasticityConfigError, "elasticity.micro_batch_sizes", r"\[\]"),
        (with_section(micro_batch_sizes=[1.5]), ElasticityConfigError, "elasticity.micro_batch_sizes", "1.5"),
        (with_section(max_train_batch_size=0), ElasticityConfigError, "elasticity.max_train_batch_size", "0"),
        (with_section(max_train_batch_size="9"), ElasticityConfigError, "elasticity.max_train_batch_size", "'9'"),
        (with_section(min_gpus=9, max_gpus=8), ElasticityConfigError, "elasticity.min_gpus", "above max_gpus 8"),
        (with_section(min_time=-1), ElasticityConfigError, "elasticity.min_time", "-1"),
        (with_section(version=0.3), ElasticityConfigError, "elasticity.version", "0.3"),
        (with_section(version="x"), ElasticityConfigError, "elasticity.version", "'x'"),
        (with_section(model_parallel_size=2), ElasticityConfigError, "elasticity.model_parallel_size", "0.1"),
        (with_section(version=0.2), ElasticityConfigError, "elasticity, WORLD_SIZE", "number of ranks"),
    ],
)
def test_refused(config, kind, where, text):
    with pytest.raises(kind, match=text) as raised:
        compute_elastic_config(config, VERSION)
    assert raised.value.where == where and raised.value.fix
    assert isinstance(raised.value, (ElasticityError, ConfigError))


@pytest.mark.parametrize(
    ("version", "is_fine"),
    [
        *(("0.3.8", True), ("0.3.10", True), ("0.19.6+c0.1.0", True), ("1.0", True), ("v0.4", True)),
        *(("0.3.7", False), ("0.3", False), ("0.3.8rc1", False), ("0.3.8.dev0", False), ("new", False)),
        (deepspeed_c.__version__, True),
    ],
)
def test_versions(version, is_fine):
    if is_fine:
        assert compute_elastic_config({"elasticity": SECTION}, version)[0] == 96
    else:
        with pytest.raises(ElasticityError, match="from 0.3.8 on"):
            compute_elastic_config({"elasticity": SECTION}, version)


@pytest.mark.parametrize("world_size", [-1, 1.5, "2"])
def test_no_number_of_ranks(world_size):
    with pytest.raises(ElasticityConfigError, match="is not a number of ranks"):
        compute_elastic_config({"elasticity": SECTION}, VERSION, world_size)


def test_hosts_that_no_model_copies_fill():
    section = {**SECTION, "version": 0.2, "num_gpus_per_node": 4, "model_parallel_size": 3}
    with pytest.raises(ElasticityError, match="copies of 3") as raised:
        compute_elastic_config({"elasticity": section}, VERSION, 4)
    assert not isinstance(raised.value, (ElasticityConfigError, ElasticityIncompatibleWorldSize))


# -- configurations ----------------------------------------------------------------------------------------------------


def test_every_number_of_ranks_gets_the_same_batch():
    batch, worlds = compute_elastic_config({"elasticity": SECTION}, VERSION)
    assert batch == 96 and len(worlds) > 5
    for world_size in worlds:
        config = load_config({"elasticity": SECTION}, world_size=world_size)
        sizes = config.batch
        assert sizes.train_batch_size == batch == math.prod(sizes[1:]) and sizes.world_size == world_size, sizes
        assert sizes.micro_batch_size in SECTION["micro_batch_sizes"]
        assert (config.train_batch_size, config.gradient_accumulation_steps) == (batch, sizes.accumulation_steps)
        assert config.source_of("train_batch_size") == config.source_of("gradient_accumulation_steps") == "derived"


@pytest.mark.parametrize(
    ("world_size", "named"),
    [
        (5, "the nearest of 11 numbers that can: 2, 3, 4, 6, 8, 12"),
        (37, "the nearest of 11 numbers that can: 16, 24, 32, 48"),
    ],
)
def test_world_that_is_not_allowed(world_size, named):
    assert compute_elastic_config({"elasticity": SECTION}, VERSION)[1] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
    with pytest.raises(ElasticityIncompatibleWorldSize) as raised:
        load_config({"elasticity": SECTION}, world_size=world_size)
    assert named in str(raised.value), raised.value
    few = {**SECTION, "max_gpus": 4}
    with pytest.raises(ElasticityIncompatibleWorldSize, match="; 1, 2, 3, 4 can"):
        load_config({"elasticity": few}, world_size=world_size)
    none = {**SECTION, "min_gpus": 500}
    with pytest.raises(ElasticityIncompatibleWorldSize, match="no number within min_gpus and max_gpus can"):
        load_config({"elasticity": none}, world_size=world_size)


def test_batch_without_a_sample_for_each_rank():
    section = {**SECTION, "version": 0.2}
    assert load_config({"elasticity": section}, world_size=50).batch.train_batch_size == 100
    with pytest.raises(ElasticityIncompatibleWorldSize, match="51 ranks") as raised:
        load_config({"elasticity": section}, world_size=51)
    assert raised.value.where == "elasticity.max_train_batch_size"
    assert outcome(section, 51)[0] == 0  # DeepSpeed's number


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize("value", [72, "auto"])
@pytest.mark.parametrize("names", [*itertools.combinations(BATCH, 1), BATCH])
def test_other_keys_of_the_batch(names, value):
    config = {"elasticity": SECTION, **dict.fromkeys(names, value)}
    for batch in ("resolve", "skip"):
        (problem,) = problems_of(config, world_size=2, batch=batch)
        assert isinstance(problem, ElasticityConfigError) and problem.where == ", ".join(names), problem
        assert "ignore_non_elastic_batch_info" in problem.fix
    config["elasticity"] = {**SECTION, "ignore_non_elastic_batch_info": True}
    for strict in (False, True):
        read = load_config({**config, "strict": strict}, world_size=2)
        assert tuple(read.batch) == (96, 3, 16, 2), read.batch
        ignored = [note.split(" ")[0] for note in read.notes if "is ignored: elasticity makes it" in note]
        assert ignored == [*names], read.notes
    assert load_config(config, world_size=2, batch="skip").batch is None


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"min_gpus": 9, "max_gpus": 8}, "elasticity.min_gpus"),
        ({"micro_batch_sizes": [2, 0]}, "elasticity.micro_batch_sizes[1]"),
        ({"max_gpu": 4}, "elasticity.max_gpu"),
    ],
)
def test_malformed_section_is_reported_without_a_number_of_ranks(change, where):
    (problem,) = problems_of({"elasticity": {**SECTION, **change}}, batch="skip")
    assert problem.where.startswith(where.partition("[")[0]), problem
    (missing,) = problems_of({"elasticity": {"enabled": True, "micro_batch_sizes": [1]}}, batch="skip")
    assert missing.where == "elasticity.max_train_batch_size" and "missing" in missing.what


def test_disabled_section_changes_nothing():
    config = {"train_batch_size": 8, "elasticity": {**SECTION, "enabled": False}}
    assert tuple(load_config(config, world_size=2).batch) == (8, 4, 1, 2)
    assert not elasticity_enabled(config) and not elasticity_enabled({}) and elasticity_enabled({"elasticity": SECTION})


def test_a_tuner_and_elasticity_do_not_both_decide():
    (problem,) = problems_of({"elasticity": SECTION, "autotuning": {"enabled": True}}, world_size=2)
    assert problem.where == "autotuning.enabled, elasticity.enabled"


# -- the section that a scheduler has seen -----------------------------------------------------------------------------


def test_section_that_changed_is_refused(monkeypatch, caplog):
    ensure_immutable_elastic_config(SECTION)
    assert SEEN in caplog.text
    monkeypatch.setenv(SEEN, json.dumps(SECTION))
    caplog.clear()
    ensure_immutable_elastic_config(SECTION)
    ensure_immutable_elastic_config({**SECTION, "min_time": 20, "ignore_non_elastic_batch_info": True})
    assert not caplog.text
    assert load_config({"elasticity": SECTION}, world_size=2).batch.train_batch_size == 96
    changes = [("max_train_batch_size", 101), ("micro_batch_sizes", [3, 2]), ("version", 0.2), ("min_gpus", 2)]
    changes += [("max_gpus", 99), ("prefer_larger_batch", False), ("num_gpus_per_node", 2)]
    for key, value in changes:
        with pytest.raises(ElasticityConfigError) as raised:
            ensure_immutable_elastic_config({**SECTION, key: value})
        assert raised.value.where == f"elasticity.{key}" and SEEN in raised.value.what
    with pytest.raises(ElasticityConfigError) as raised:
        load_config({"elasticity": {**SECTION, "max_train_batch_size": 101}}, world_size=2)
    assert raised.value.where == "elasticity.max_train_batch_size"


@pytest.mark.parametrize("text", ["{", "[1]", '{"enabled": true}', "null"])
def test_malformed_section_of_a_scheduler(text, monkeypatch):
    monkeypatch.setenv(SEEN, text)
    with pytest.raises(ElasticityConfigError) as raised:
        ensure_immutable_elastic_config(SECTION)
    assert raised.value.where.startswith(SEEN) and raised.value.fix


# -- DeepSpeed's objects and programs ----------------------------------------------------------------------------------


def test_section_as_an_object():
    made = ElasticityConfig({})
    assert (made.enabled, made.max_acceptable_batch_size, made.micro_batches) == (False, 2000, [2, 4, 6])
    assert (made.min_gpus, made.max_gpus, made.min_time, made.version) == (1, 10000, 0, 0.2)
    assert (made.model_parallel_size, made.num_gpus_per_node) == (1, 1)
    assert made.prefer_larger_batch_size is True and made.ignore_non_elastic_batch_info is False
    assert json.loads(repr(made)) == made.repr() == vars(made)


def test_deepspeed_config():
    made = DeepSpeedConfig({"elasticity": {**SECTION, "num_gpus_per_node": 2}})
    assert made.elasticity_enabled and (made.elastic_model_parallel_size, made.num_gpus_per_node) == (1, 2)
    sizes = (made.train_batch_size, made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps)
    assert sizes == (96, 3, 32)
    with pytest.raises(ElasticityConfigError, match="train_batch_size"):
        DeepSpeedConfig({"elasticity": SECTION, "train_batch_size": 8})
    assert not DeepSpeedConfig({"train_batch_size": 8}).elasticity_enabled


LINES = ["final_batch_size .... 96", "valid_gpus .......... [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]"]


@pytest.mark.parametrize("words", [["elastic"], ["ds_elastic"]])
def test_command(words, tmp_path, capsys):
    from deepspeed_c.launcher import programs

    run = programs.main if words == ["ds_elastic"] else command.main
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"elasticity": SECTION, "bf16": {"enabled": True}}))
    assert run([*words, "-c", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-2:] == LINES and '"max_train_batch_size": 100' in out and "bf16" not in out
    assert run([*words, "--config", str(file), "--world-size", "4"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-3:] == [*LINES, "micro_batch_size .... 3"] and "for world size 4" in out
    for world_size, section in ((5, SECTION), (51, {**SECTION, "version": 0.2}), (2, {**SECTION, "max_gpu": 1})):
        file.write_text(json.dumps({"elasticity": section}))
        assert run([*words, "-c", str(file), "-w", str(world_size)]) != 0
        out, err = capsys.readouterr()
        assert out == "" and "elasticity" in err and "Fix: " in err


NAMES = """
import json
import deepspeed_c
deepspeed_c.install_as_deepspeed(force=True)
import deepspeed
from deepspeed.elasticity import DSElasticAgent, compute_elastic_config, ensure_immutable_elastic_config
from deepspeed.elasticity.config import ElasticityConfig, ElasticityConfigError, ElasticityError
from deepspeed.elasticity.config import ElasticityIncompatibleWorldSize, MAX_GPUS_DEFAULT
from deepspeed.elasticity.constants import DEEPSPEED_ELASTICITY_CONFIG, LATEST_ELASTICITY_VERSION
from deepspeed.elasticity.elasticity import elasticity_enabled, get_best_candidates, get_candidate_batch_sizes
from deepspeed.elasticity.elasticity import get_valid_gpus, MINIMUM_DEEPSPEED_VERSION
from deepspeed.elasticity.utils import is_torch_elastic_compatible
config = {"elasticity": json.loads(SECTION)}
said = []
try:
    compute_elastic_config(config, deepspeed.__version__, world_size=5)
except ElasticityIncompatibleWorldSize as error:
    said.append(isinstance(error, ElasticityError) and not isinstance(error, ElasticityConfigError))
try:
    DSElasticAgent(None, {})
except NotImplementedError as error:
    said.append("deepspeed_c --elastic_training" in str(error))
print(json.dumps([
    compute_elastic_config(config, deepspeed.__version__, world_size=4)[::2], elasticity_enabled(config),
    ElasticityConfig(config["elasticity"]).micro_batches, MAX_GPUS_DEFAULT, DEEPSPEED_ELASTICITY_CONFIG,
    LATEST_ELASTICITY_VERSION, MINIMUM_DEEPSPEED_VERSION, is_torch_elastic_compatible(), said,
]))
"""


def test_names_of_deepspeed():
    done = fresh.run(["-c", NAMES.replace("SECTION)", f"{json.dumps(SECTION)!r})")])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [[96, 3], True, [2, 3], 10000, SEEN, 0.2, "0.3.8", True, [True, True]], found


@on_ranks(2)
def test_engine_has_the_batch_of_the_section(rank: int, world: int, folder: str) -> None:
    config = {"elasticity": SECTION, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    engine, _, loader, _ = deepspeed_c.initialize(
        model=torch.nn.Linear(3, 1), config=config, training_data=[torch.ones(3)] * 192
    )
    sizes = (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    )
    assert sizes == (96, 3, 16)
    assert engine.elasticity_enabled() is True and engine.is_elastic_model_parallel_supported() is True
    batches = list(loader)
    for batch in batches:
        engine.backward(engine(batch).mean())
        engine.step()
    assert [len(batch) for batch in batches] == [3] * 32 and engine.global_steps == 2
    engine.close()
    plain, *_ = deepspeed_c.initialize(model=torch.nn.Linear(3, 1), config={"train_batch_size": 2})
    assert plain.elasticity_enabled() is False and plain.is_elastic_model_parallel_supported() is False
    plain.close()
    with pytest.raises(ElasticityIncompatibleWorldSize, match="2 ranks"):
        deepspeed_c.initialize(
            model=torch.nn.Linear(3, 1), config={"elasticity": {**SECTION, "min_gpus": 3, "max_gpus": 4}}
        )
