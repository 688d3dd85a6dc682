"""utils/checkpointing.py: what is off is accepted, from arguments and from a configuration; what is on is an error that names it."""

from __future__ import annotations

import pytest

from deepspeed_c.errors import FeatureError
from deepspeed_c.utils import checkpointing

SECTION = {"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": 4}


@pytest.fixture
def unconfigured(monkeypatch):
    monkeypatch.setattr(checkpointing, "_is_configured", False)


def test_what_is_off_is_accepted(unconfigured):
    assert not checkpointing.is_configured()
    checkpointing.configure(
        None, partition_activations=False, contiguous_checkpointing=None, checkpoint_in_cpu=False, profile=None
    )
    checkpointing.configure(None, deepspeed_config={"activation_checkpointing": SECTION})
    checkpointing.configure(None, deepspeed_config={"train_batch_size": 1})
    assert checkpointing.is_configured()


@pytest.mark.parametrize(
    "argument", ["partition_activations", "contiguous_checkpointing", "checkpoint_in_cpu", "synchronize", "profile"]
)
def test_what_is_on_is_an_error(unconfigured, argument):
    with pytest.raises(FeatureError, match=argument):
        checkpointing.configure(None, **{argument: True})
    assert not checkpointing.is_configured()


def test_a_configuration_counts_where_an_argument_is_not_given(unconfigured):
    config = {"activation_checkpointing": {**SECTION, "cpu_checkpointing": True}}
    with pytest.raises(FeatureError, match="checkpoint_in_cpu"):
        checkpointing.configure(None, deepspeed_config=config)
    checkpointing.configure(None, deepspeed_config=config, checkpoint_in_cpu=False)
