"""benchmarks/stream.py: the pass reads every gradient and changes no value, for any dtype, length and number of parts."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.stream import Part, bytes_of, stream_step


def make_part(n: int, grad_dtype: torch.dtype, has_copy: bool, seed: int) -> Part:
    generator = torch.Generator().manual_seed(seed)
    param, grad, state0, state1 = (torch.randn(n, generator=generator) for _ in range(4))
    copy = torch.full((n,), 7.0, dtype=torch.bfloat16) if has_copy else None
    return Part(param, grad.to(grad_dtype), state0, state1, copy)


# Sizes near a lane, sizes near a chunk, and enough chunks for all threads.
@pytest.mark.parametrize("sizes", [[1], [15, 0, 17], [16383, 16384, 16385], [1_000_003], [3] * 1000])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_copy", [False, True])
def test_a_pass_sees_all_gradients_and_changes_nothing(sizes, grad_dtype, has_copy):
    parts = [make_part(n, grad_dtype, has_copy, i) for i, n in enumerate(sizes)]
    before = [[tensor.clone() for tensor in part[:4]] for part in parts]
    seconds, sumsq = stream_step(parts, with_norm=True)
    assert seconds > 0
    expected = sum(part.grad.double().square().sum().item() for part in parts)
    assert math.isclose(sumsq, expected, rel_tol=1e-4), (sumsq, expected)
    for part, tensors in zip(parts, before):
        for found, was in zip(part[:4], tensors):
            assert torch.equal(found, was)
        if has_copy:
            assert torch.equal(part.copy, part.param.bfloat16())


def test_without_the_norm_gradients_are_read_once():
    part = make_part(100_000, torch.bfloat16, True, 0)
    assert stream_step([part], with_norm=False)[1] == 0.0
    assert bytes_of([part], with_norm=True) == 30 * 100_000
    assert bytes_of([part], with_norm=False) == 28 * 100_000
    assert bytes_of([part._replace(copy=None, grad=part.grad.float())], with_norm=False) == 28 * 100_000


def test_tensors_that_are_no_step_are_refused():
    part = make_part(64, torch.float32, False, 0)
    with pytest.raises(ValueError, match="state1"):
        stream_step([part._replace(state1=torch.zeros(63))], with_norm=True)
    with pytest.raises(ValueError, match="grad.*float16"):
        stream_step([part._replace(grad=part.grad.half())], with_norm=True)
    with pytest.raises(ValueError, match="param"):
        stream_step([part._replace(param=torch.zeros(64, 2)[:, 0])], with_norm=True)
