"""A probe of a rank's arithmetic: products and functions of a transformer, on inputs that are the same everywhere.

Ranks whose processors or libraries round differently have other bits in its results, and would never train alike. Its
inputs come from integers, so that they do not depend on torch's random numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_c import _C
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import RankMismatchError
from deepspeed_c.processor import processor_name

__all__ = ["Probe", "check_probes", "run_probe"]

# (rows, inputs, outputs) of layers. Libraries choose other loops for one row, for few, and for the ends of odd sizes.
_SHAPES = ((1, 64, 64), (3, 1000, 37), (7, 33, 65), (64, 128, 96))
# A layer whose products are large enough to be divided among threads; in float32 alone, because products of 16 bits may
# be slow.
_LARGE = (64, 384, 384)


class Probe(NamedTuple):
    """The result of one rank's probe."""

    crcs: tuple[tuple[str, int], ...]
    """(name of a computation, CRC32C of the bytes of its result)"""
    machine: str
    """Processor, version of torch, and the instructions that torch uses."""

    @property
    def checksum(self) -> int:
        """CRC32C over all results."""
        return _C.crc32c(b"".join(crc.to_bytes(4, "little") for _, crc in self.crcs))


def run_probe(device: torch.device, dtypes: Sequence[torch.dtype]) -> Probe:
    """Computes in each of ``dtypes`` on ``device``; well under 0.1 s on a CPU."""
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        crcs = tuple((name, _crc_of(result)) for dtype in dtypes for name, result in _results(device, dtype))
    return Probe(crcs, _machine(device))


def check_probes(probe: Probe, comm: Collectives) -> None:
    """Raises RankMismatchError, on all ranks alike, unless all ranks have the same bits. It names the ranks with other
    bits than most, the first computation that differs, and the machines. Collective."""
    everyone: list[Probe] = comm.gather_objects(probe, label="probe of same_bits")
    counts = Counter(other.crcs for other in everyone)
    if len(counts) == 1:
        return
    usual = next(other for other in everyone if counts[other.crcs] == max(counts.values()))
    odd = [rank for rank, other in enumerate(everyone) if other.crcs != usual.crcs]
    first = everyone[odd[0]]
    name = next(mine[0] for mine, other in zip(first.crcs, usual.crcs) if mine != other)
    raise RankMismatchError(
        f"{name}: rank {', '.join(str(comm.global_ranks[rank]) for rank in odd)} has other bits than"
        f" rank {comm.global_ranks[everyone.index(usual)]}, on the same inputs: {first.machine}; {usual.machine}",
        where="same_bits.enabled",
        fix="run all ranks on processors with the same instructions and with the same version of torch (ATEN_CPU_CAPABILITY"
        " limits the instructions); or set same_bits.enabled to false. A rank of a machine like the others has a defect",
    )


def _machine(device: torch.device) -> str:
    text = f"{processor_name()}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cpu":
        return text
    return f"{torch.get_device_module(device).get_device_name(device)}, {text}"


def _crc_of(result: Tensor) -> int:
    return _C.crc32c(result.detach().cpu().contiguous().view(torch.uint8).numpy())


def _numbers(shape: Sequence[int], seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers in [-2, 2) with 16 bits behind the point, from a linear congruence."""
    n = torch.Size(shape).numel()
    integers = (torch.arange(n, dtype=torch.int64) * 40503 + seed * 30011 + 12345) * 48271 % 2147483647 % 65536
    return ((integers - 32768).float() / 16384).view(*shape).to(device, dtype)


def _results(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, result) of each computation."""
    kind = str(dtype).removeprefix("torch.")
    for n_rows, n_in, n_out in (*_SHAPES, *([_LARGE] if dtype == torch.float32 else [])):
        x, w = _numbers((n_rows, n_in), 1, device, dtype), _numbers((n_out, n_in), 2, device, dtype)
        b, dy = _numbers((n_out,), 3, device, dtype), _numbers((n_rows, n_out), 4, device, dtype)
        layer = f"of a linear layer, {n_rows} rows, {n_in} inputs, {n_out} outputs, {kind}"
        yield f"output {layer}", F.linear(x, w, b)
        yield f"gradient of the input {layer}", dy @ w
        yield f"gradient of the weight {layer}", dy.t() @ x
    # Beyond 32768 elements torch divides loops over elements among threads.
    rows, ones = _numbers((69, 521), 5, device, dtype), _numbers((521,), 6, device, dtype)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda x: torch.softmax(x, -1),
        "layer_norm": lambda x: F.layer_norm(x, (521,), ones, ones),
        "exp": torch.exp,
        "gelu": F.gelu,
        "sum": lambda x: x.sum(0),
    }
    for name, function in functions.items():
        x = rows.clone().requires_grad_()
        y = function(x)
        yield f"{name} of {tuple(rows.shape)}, {kind}", y
        yield f"gradient of {name} of {tuple(rows.shape)}, {kind}", torch.autograd.grad(y.float().square().sum(), x)[0]
    heads = [_numbers((2, 3, 17, 24), seed, device, dtype).requires_grad_() for seed in (7, 8, 9)]
    y = F.scaled_dot_product_attention(*heads, is_causal=True)
    yield f"attention over 17 tokens, {kind}", y
    for name, grad in zip(("queries", "keys", "values"), torch.autograd.grad(y.float().square().sum(), heads)):
        yield f"gradient of {name} of attention over 17 tokens, {kind}", grad
