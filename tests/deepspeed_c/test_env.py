"""The environment variables: defaults, values, and what is refused."""

from dataclasses import FrozenInstanceError, fields

import pytest

from deepspeed_c.env import Env, read_env
from deepspeed_c.errors import ConfigError


def test_defaults():
    assert read_env({}) == Env()
    assert (Env().rank, Env().world_size, Env().local_rank, Env().local_world_size) == (0, 1, 0, 1)
    assert read_env({"RANK": "", "DSC_LOG": "  "}) == Env()


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
            "OTHER": "x",
        }
    )
    assert env == Env(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_addr="host",
        master_port=29500,
        omp_num_threads=8,
        cpu_isa="avx2",
        num_threads=6,
        log="debug,json",
        alias_force="1",
        timeout_minutes=0.5,
        accelerator="cpu",
    )


@pytest.mark.parametrize(
    "name, text",
    [
        ("RANK", "-1"),
        ("RANK", "one"),
        ("RANK", "1.0"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("MASTER_PORT", "0"),
        ("OMP_NUM_THREADS", "0"),
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
    with pytest.raises(ConfigError) as error:
        read_env({name: text})
    assert error.value.where == name and text in error.value.what and error.value.fix


def test_reads_the_environment_of_the_process(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert read_env().local_rank == 5


def test_every_variable_has_its_name_and_cannot_be_set():
    names = [field.metadata["name"] for field in fields(Env)]
    assert len(set(names)) == len(names)
    with pytest.raises(FrozenInstanceError):
        Env().rank = 1
