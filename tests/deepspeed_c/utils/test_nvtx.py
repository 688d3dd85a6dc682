"""A range is opened and closed around each call, even if the call raises. torch.compile does not see the range."""

import pytest
import torch

from deepspeed_c import accelerator
from deepspeed_c.accelerator import Accelerator
from deepspeed_c.utils import instrument_w_nvtx


class Heard(Accelerator):
    def __init__(self):
        super().__init__("cpu")
        self.heard = []

    def range_push(self, msg, domain=None, category=None):
        self.heard.append(msg)

    def range_pop(self, domain=None):
        self.heard.append(None)


@pytest.fixture
def heard(monkeypatch):
    listener = Heard()
    monkeypatch.setattr(accelerator, "_chosen", [listener])
    return listener.heard


@instrument_w_nvtx
def double(x, *, fail=False):
    """Twice x."""
    if fail:
        raise ValueError(x)
    return x * 2


def test_range_around_a_call(heard):
    assert double(3) == 6 and heard == ["double", None]
    with pytest.raises(ValueError):
        double(3, fail=True)
    assert heard == ["double", None] * 2
    assert double.__name__ == "double" and double.__doc__ == "Twice x."


def test_compiled_without_a_range(heard):
    compiled = torch.compile(double, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0)) and heard == []
