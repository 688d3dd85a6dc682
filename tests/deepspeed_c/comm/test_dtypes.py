"""Every dtype of torch travels bit by bit, over gloo, over shared memory and over both, also those that gloo refuses;
and a model with buffers of such dtypes trains at every stage.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from tests.hosts import why_no_hosts
from tests.training import config, engine_of, update

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    *(getattr(torch, name) for name in dir(torch) if name.startswith("float8_")),
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
LENGTHS = [1, 7, 257]


def drawn(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, with all NaNs and infinities of the dtype among them; a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


def moves(rank: int, world: int, local: str) -> None:
    comm = Collectives()
    comm.use_shared_memory(local)
    for dtype in DTYPES:
        for numel in LENGTHS:
            what = f"{dtype}, {numel} elements, rank {rank}"
            rows = [drawn(numel, dtype, seed) for seed in range(world)]
            tensor = rows[rank].clone().view(1, numel, 1)
            comm.broadcast(tensor, world - 1)
            assert bits(tensor) == bits(rows[world - 1]), f"broadcast of {what}"
            for use_broadcast in (False, True):
                flat = torch.zeros(world * numel, dtype=torch.uint8).repeat_interleave(dtype.itemsize).view(dtype)
                comm.own_slice(flat).copy_(rows[rank])
                comm.all_gather(flat, use_broadcast=use_broadcast).wait()
                assert bits(flat) == [b for row in rows for b in bits(row)], f"all_gather of {what}"
            listed = comm.all_gather_list(rows[rank].view(numel, 1))
            assert [bits(row) for row in listed] == [bits(row) for row in rows], f"all_gather_list of {what}"
            received = torch.empty(numel, dtype=dtype)
            comm.shift(rows[rank], received, 1).wait()
            assert bits(received) == bits(rows[(rank - 1) % world]), f"shift of {what}"
            if rank < 2:
                tensor = rows[rank].clone().view(numel, 1)
                comm.message(tensor, 0, 1, tag=3).wait()
                assert bits(tensor) == bits(rows[0]), f"message of {what}"
            # Rank r sends r elements to rank 0, r + 1 to rank 1, and so on.
            whole = drawn(sum(range(rank, rank + world)), dtype, rank)
            out = torch.empty(sum(range(rank, rank + world)), dtype=dtype)
            splits = list(range(rank, rank + world))
            comm.all_to_all(whole, out, splits, splits).wait()
            blocks = [drawn(sum(range(r, r + world)), dtype, r).split(list(range(r, r + world))) for r in range(world)]
            assert bits(out) == [b for r in range(world) for b in bits(blocks[r][rank])], f"all_to_all of {what}"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("local", ["off", "shm"])
def test_every_dtype_travels_bit_by_bit(run_ranks, world: int, local: str) -> None:
    run_ranks(world, moves, local)


def test_every_dtype_travels_between_hosts(run_ranks) -> None:
    if why_no_hosts():
        pytest.skip(why_no_hosts())
    run_ranks(3, moves, "auto", hosts=(0, 0, 1))


CODES = torch.tensor([0.5, -2.0, 448.0, float("nan")])


class Buffered(torch.nn.Module):
    """A layer with buffers of dtypes that gloo refuses."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.register_buffer("places", torch.tensor([-300, 0, 301], dtype=torch.int16) * (rank + 1))
        self.register_buffer("codes", (CODES if rank == 0 else torch.zeros(4)).to(torch.float8_e4m3fn))
        self.register_buffer("count", torch.tensor(40_000 + rank).to(torch.uint16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.places.to(x.dtype).sum() + self.codes[1].to(x.dtype)


def buffers_body(rank: int, world: int, stage: int) -> list[object]:
    torch.manual_seed(rank)
    model = Buffered(rank)
    engine = engine_of(model, config(stage, "AdamW", rows=2, lr=1e-2, comm={"local": "off"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update(engine, engine(torch.ones(2, 6)).square().mean())
    found = [model.places.tolist(), bits(model.codes), int(model.count)]
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buffers_of_every_dtype_come_from_rank_0(run_ranks, stage: int) -> None:
    want = [[-300, 0, 301], bits(CODES.to(torch.float8_e4m3fn)), 40_000]
    found = run_ranks(2, buffers_body, stage)
    assert found == [want] * 2, f"{found} instead of {want} on both ranks"
