"""The environment variables: their defaults, their values, and refusals."""

import os

import pytest
import torch

import deepspeed_c
from deepspeed_c.env import VARIABLES, read_env
from deepspeed_c.errors import CommError, ConfigError
from tests.ranks import run_ranks


def test_defaults():
    for env in (read_env({}), read_env({"RANK": "", "DSC_LOG": "  "})):
        assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (0, 1, 0, 1)
        assert all(getattr(env, attribute) == facts.default for attribute, facts in VARIABLES.items())


def test_values():
    env = read_env(
        {
            "RANK": "3",
            "WORLD_SIZE": " 4 ",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "host",
            "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "8",
            "DSC_CPU_ISA": "avx2",
            "DSC_NUM_THREADS": "6",
            "DSC_LOG": "debug,json",
            "DSC_ALIAS_FORCE": "1",
            "DEEPSPEED_TIMEOUT": "0.5",
            "DS_ACCELERATOR": "cpu",
            "DSC_RUN_TOKEN": "s3cret",
            "OTHER": "x",
        }
    )
    expected = {
        "rank": 3,
        "world_size": 4,
        "local_rank": 1,
        "local_world_size": 2,
        "local_size": None,
        "master_addr": "host",
        "master_port": 29500,
        "omp_num_threads": "8",
        "cpu_isa": "avx2",
        "num_threads": 6,
        "log": "debug,json",
        "alias_force": "1",
        "timeout_minutes": 0.5,
        "restart_count": 0,
        "accelerator": "cpu",
        "run_token": "s3cret",
        "alias_python": None,
    }
    unset = dict.fromkeys(VARIABLES)
    found = {attribute: getattr(env, attribute) for attribute in VARIABLES}
    assert found == unset | expected, found
    assert "s3cret" not in repr(env) and "s3cret" not in str(env)


def test_each_text_is_read_under_its_own_name():
    texts = {name: facts for name, facts in VARIABLES.items() if facts.kind is str and not facts.words}
    assert len(texts) > 20
    for attribute, facts in texts.items():
        env = read_env({facts.name: " a,b \n"})
        assert {name: value for name in texts if (value := getattr(env, name)) is not None} == {attribute: "a,b"}


@pytest.mark.parametrize(
    "name, text",
    [
        ("RANK", "-1"),
        ("RANK", "one"),
        ("RANK", "1.0"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("MASTER_PORT", "0"),
        ("DSC_CPU_ISA", "sse9"),
        ("DSC_NUM_THREADS", "0"),
        ("DSC_ALIAS_FORCE", "yes"),
        ("DEEPSPEED_TIMEOUT", "0"),
        ("DEEPSPEED_TIMEOUT", "nan"),
        ("DEEPSPEED_TIMEOUT", "inf"),
        ("DEEPSPEED_TIMEOUT", "-3"),
    ],
)
def test_refused(name, text):
    env = read_env({name: text})
    attribute = next(attribute for attribute, facts in VARIABLES.items() if facts.name == name)
    with pytest.raises(ConfigError) as error:
        getattr(env, attribute)
    assert error.value.where == name and text in error.value.what and error.value.fix
    others = [getattr(env, other) == facts.default for other, facts in VARIABLES.items() if other != attribute]
    assert all(others), "another variable than the one that is malformed was judged"


def test_reads_the_environment_of_the_process(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert read_env().local_rank == 5


def test_every_variable_has_its_name_and_cannot_be_set():
    names = [facts.name for facts in VARIABLES.values()]
    assert len(set(names)) == len(names)
    with pytest.raises(AttributeError, match="RANK is only read here"):
        read_env({}).rank = 1
    with pytest.raises(AttributeError):
        _ = read_env({}).no_such_variable


def junk_body(rank, world, folder):
    """A group exists already, and then a store is given, so no address is needed."""
    os.environ.update(MASTER_PORT="None", MASTER_ADDR="", OMP_NUM_THREADS="many", DEEPSPEED_TIMEOUT="long", RANK="?")
    deepspeed_c.init_distributed()
    model = torch.nn.Linear(3, 3)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = deepspeed_c.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    engine.save_checkpoint(folder)
    engine.close()
    torch.distributed.destroy_process_group()
    os.environ.update(DEEPSPEED_TIMEOUT="1")
    for given in ({"rank": rank, "world_size": world}, {}):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
        deepspeed_c.init_distributed(init_method=f"file://{folder}/store{len(given)}", **given)
        assert torch.distributed.get_world_size() == world
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    # The port is checked where it is needed.
    with pytest.raises(CommError, match="MASTER_PORT is 'None'"):
        deepspeed_c.init_distributed()


def test_what_nobody_needs_may_hold_anything(tmp_path):
    run_ranks(2, junk_body, str(tmp_path), fresh=True)
