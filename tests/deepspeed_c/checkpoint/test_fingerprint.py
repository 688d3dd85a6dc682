"""The fingerprint of a checkpoint: the CRC32C of each tensor against its definition, and what counts."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c import _C
from deepspeed_c.checkpoint import fingerprint
from deepspeed_c.checkpoint.fingerprint import Fingerprint, TensorPrint, fingerprint_of_source
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM
from tests.deepspeed_c.checkpoint.memory_source import adam_checkpoint


def crc32c(content: bytes) -> int:
    """By its definition, one bit after the other."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (7,), (5, 3), (3, 5, 2)])
def test_parts_give_the_crc_of_the_whole(shape, dtype):
    tensor = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = crc32c(bytes_of(tensor))
    flat = tensor.reshape(-1)
    for cut in range(flat.numel() + 1):
        crc = 0
        for begin, end in ((0, cut), (cut, flat.numel())):
            part = [*[0] * len(shape), *shape, begin, end - begin]
            (one,) = _C.crc32c_parts([(shape, part, dtype.itemsize, flat[begin:end].view(torch.uint8).numpy())])
            crc ^= one
        assert _C.crc32c_of_parts(crc, flat.numel() * dtype.itemsize) == expected, (cut, crc, expected)


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 numbers, must have 4"):
        _C.crc32c_parts([((4,), [0, 4, 0], 1, b"1234")])
    with pytest.raises(ValueError, match=r"pieces\[1\].* 4 bytes"):
        _C.crc32c_parts([((4,), [0, 4, 0, 4], 1, b"1234"), ((4,), [0, 4, 0, 3], 1, b"1234")])
    with pytest.raises(ValueError, match=r"pieces\[0\]"):
        _C.crc32c_parts([((4,), [1, 4, 0, 4], 1, b"1234")])


def test_a_source_is_read_in_pieces(monkeypatch):
    monkeypatch.setattr(fingerprint, "READ_BYTES", 28)
    source = adam_checkpoint()
    found = fingerprint_of_source(source)
    names = {name for kind, name in source.tensors if kind in (PARAM, MASTER)}
    assert {name for kind, name in found.tensors if kind == PARAM} == names
    for (kind, name), tensor in found.tensors.items():
        stored = source.tensors.get((MASTER, name), source.tensors.get((PARAM, name)))
        stored = stored if kind == PARAM else source.tensors[kind, name]
        value = source.values[stored.key]
        assert (tensor.dtype, tensor.shape) == (value.dtype, tuple(value.shape))
        assert tensor.crc == crc32c(bytes_of(value)), (kind, name, tensor)
    assert found.number == fingerprint_of_source(adam_checkpoint()).number


def test_a_master_stands_for_its_weight_and_buffers_do_not_count():
    weight = TensorPrint(PARAM, "a", torch.bfloat16, (2,), 1)
    master = TensorPrint(MASTER, "a", torch.float32, (2,), 2)
    other = TensorPrint(PARAM, "b", torch.float32, (2,), 3)
    expected = Fingerprint([master._replace(kind=PARAM), other])
    assert (
        Fingerprint([weight, other, master, TensorPrint(BUFFER, "c", torch.float32, (1,), 4)]).number == expected.number
    )
    assert Fingerprint([other, master]).first_difference(expected) == ""
    for change in ({"crc": 5}, {"shape": (1, 2)}, {"dtype": torch.bfloat16}, {"name": "z"}):
        changed = Fingerprint([master, other._replace(**change)])
        assert changed.number != expected.number, change
        assert "param of b: " in expected.first_difference(changed)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (5, 3)])
def test_a_state_of_zeros_is_one_that_has_not_been_made(shape):
    def printed(kind: str, tensor: torch.Tensor) -> TensorPrint:
        return TensorPrint(kind, "w", tensor.dtype, tuple(tensor.shape), crc32c(bytes_of(tensor)))

    weight, moment = printed(PARAM, torch.zeros(shape)), torch.zeros(shape)
    alone = Fingerprint([weight])
    assert set(alone.tensors) == {(PARAM, "w")}  # a weight of zeros is a weight
    assert Fingerprint([weight, printed("exp_avg", moment)]).first_difference(alone) == ""
    for other in (1.0, -0.0, 1e-45) if moment.numel() else ():
        moment.view(-1)[-1] = other
        made = Fingerprint([weight, printed("exp_avg", moment)])
        assert made.number != alone.number and "missing" in made.first_difference(alone), other
