"""Whether somebody has written to a tensor: a number of few bits that stands for its content."""

from __future__ import annotations

import torch

from deepspeed_c import _C

__all__ = ["fingerprint_of"]


def fingerprint_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A checksum of the tensor's bits, of any shape, dtype and strides. It changes if somebody writes to the tensor:
    surely if less than 32 bits in a row change, otherwise except with a probability of about 2^-32."""
    if tensor.numel() == 0:
        return (tensor.data_ptr(),)
    bits = tensor.detach().contiguous().view(-1)
    if bits.device.type == "cpu":
        # The processor's own instruction, several times as fast as sums of torch.
        return (_C.crc32c(bits.view(torch.uint8).numpy()),)
    bits = bits.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])
    width = min(bits.numel(), 4099)  # prime: rows of periodic data begin at different offsets
    n_rows = bits.numel() // width
    rows = bits.narrow(0, 0, n_rows * width).view(n_rows, width)
    by_column, by_row = rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64)
    rest = bits.narrow(0, n_rows * width, bits.numel() - n_rows * width).to(torch.int64)

    def weigh(sums: torch.Tensor) -> torch.Tensor:
        # Odd weights, so that no change of one sum is lost modulo 2^64.
        weights = torch.arange(sums.numel(), device=sums.device, dtype=torch.int64)
        return (sums * (weights * 0x1E3779B97F4A7C15 + 1)).sum() if sums.numel() else sums.new_zeros(())

    return tuple(torch.stack([weigh(by_column), weigh(by_row), weigh(rest)]).tolist())
