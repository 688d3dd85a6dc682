"""checkpointing/recomputer.py and active.py: whose settings a call follows, what errors call a layer, who is asked for ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepspeed_c import checkpointing
from deepspeed_c.checkpointing import recomputer
from deepspeed_c.checkpointing.active import current
from deepspeed_c.checkpointing.recomputer import Recomputer, check_section, label_of, tensor_parallel_ranks
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.errors import ConfigError


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    checkpointing._configured.clear()
    yield
    checkpointing._configured.clear()


def test_labels() -> None:
    layer = nn.Linear(1, 1)
    for function in (
        layer,
        layer.forward,
        functools.partial(layer, 1),
        functools.partial(nn.Linear.forward, layer),  # as transformers calls its layers
        functools.partial(functools.partial(layer.forward)),
    ):
        assert label_of(function) == "Linear"
    assert label_of(functools.partial(test_labels)) == "test_labels" and label_of(len) == "len"
    assert label_of(SimpleNamespace()) == "SimpleNamespace"


def test_an_mpu_without_such_ranks() -> None:
    assert tensor_parallel_ranks(None) is None and tensor_parallel_ranks(SimpleNamespace()) is None
    assert tensor_parallel_ranks(SimpleNamespace(get_model_parallel_group=lambda: None)) is None


def test_what_one_arena_needs() -> None:
    section = ActivationCheckpointing(contiguous_memory_optimization=True)
    with pytest.raises(ConfigError, match="here: .*partition_activations.*number_checkpoints"):
        check_section(section, None, "here")
    section = ActivationCheckpointing(contiguous_memory_optimization=True, partition_activations=True)
    with pytest.raises(ConfigError, match="number_checkpoints"):
        check_section(section, None, "here")
    check_section(section, 12, "here")
    check_section(ActivationCheckpointing(), None, "here")


def test_calls_follow_who_is_active_and_so_do_those_that_are_run_again() -> None:
    mine, seen = Recomputer(ActivationCheckpointing(python_random=True)), []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append(current())
        return x.exp().exp()

    x = torch.randn(2, requires_grad=True)
    with mine.active():
        with Recomputer(ActivationCheckpointing()).active():
            pass
        out = checkpointing.checkpoint(layer, x)
    assert current() is None
    out.sum().backward()
    checkpointing.checkpoint(layer, x).sum().backward()
    assert seen == [mine, mine, None, None] and current() is None


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_the_device_is_waited_for_at_each_boundary(monkeypatch: pytest.MonkeyPatch, is_reentrant: bool) -> None:
    done: list[str] = []
    monkeypatch.setattr(recomputer, "get_accelerator", lambda: SimpleNamespace(synchronize=lambda: done.append("wait")))
    section = ActivationCheckpointing(synchronize_checkpoint_boundary=True, use_reentrant=is_reentrant)
    Recomputer(section).run(lambda t: done.append("layer") or t * 2, (torch.randn(2, requires_grad=True),), {})
    assert done == ["wait", "layer", "wait"]


def test_the_flavour_that_is_asked_for_wins() -> None:
    checkpointing.configure(None, {"activation_checkpointing": {"use_reentrant": True}})
    x = torch.randn(2, requires_grad=True)
    assert "Reentrant" in type(checkpointing.checkpoint(torch.exp, x).grad_fn).__name__
    assert "Exp" in type(checkpointing.non_reentrant_checkpoint(torch.exp, x).grad_fn).__name__
