"""The contract of every home with its unit. To test a new home, add a row to ``HOMES``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from deepspeed_c.offload.file import SWAP_ELEMS, FileHome
from deepspeed_c.offload.swap import SwapFile, Swapper, SwapSettings, reserve
from deepspeed_c.zero.states.home import Home, Place, Tagged

CPU = torch.device("cpu")
# Label -> the home, and the memory where its tensors are used.
HOMES = {
    "device": (Place(), "device", "device"), "host": (Place(Home, is_apart=True), "host", "host"),
    "file": (Place(FileHome, is_apart=True), "file", "host"), "file on a host": (Place(FileHome), "file", "device"),
}  # fmt: skip
N_BUCKETS, N = 3, 1031  # 1031 elements fill no whole number of pages


class Owner:
    """Owns buckets of one tensor each, and notes the moves that homes report to it."""

    def __init__(self, home: Home) -> None:
        self.tensors = [home.new_zeros(N, torch.float32) for _ in range(N_BUCKETS)]
        for i, tensor in enumerate(self.tensors):
            assert not tensor.any()
            tensor.copy_(values(i))
        self.moves: list[int] = []
        home.keep(self.tensors_of, self.moves.append)

    def tensors_of(self, bucket: int) -> list[Tagged]:
        return [Tagged(self.tensors[bucket], f"bucket {bucket}", 100)]


def values(seed: int) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=HOMES)
def home(request: pytest.FixtureRequest, tmp_path) -> Iterator[Home]:
    place, label, memory = HOMES[request.param]
    home = place.make(place, CPU)
    assert (home.label, home.memory) == (label, memory)
    if isinstance(home, FileHome):
        file = SwapFile(reserve(str(tmp_path), 0, "test"), SwapSettings(checksum=True), str(tmp_path))
        home.attach(Swapper(file))
    yield home
    home.end()
    home.end()  # units that share a file each call end()


def test_what_is_written_is_there_when_it_is_opened_again(home: Home) -> None:
    owner = Owner(home)
    with home.open(0):  # nothing has moved yet, so values are unchanged
        assert torch.equal(owner.tensors[0], values(0))
    for bucket in range(N_BUCKETS - 1):
        home.move_in(bucket)
    home.wait()
    is_file = home.label == "file"
    assert [home.needs_open(bucket) for bucket in range(N_BUCKETS)] == [is_file, is_file, False]
    for bucket in range(N_BUCKETS):
        home.read_ahead(bucket)
        with home.open(bucket), home.open(bucket, writes=False):
            assert torch.equal(owner.tensors[bucket], values(bucket)), owner.tensors[bucket]
            owner.tensors[bucket].add_(1)
    for bucket in (1, 2, 0):
        with home.open(bucket, writes=False):
            assert torch.equal(owner.tensors[bucket], values(bucket) + 1), owner.tensors[bucket]
        # A use of a bucket that is not open reads NaN, where buckets have to be opened.
        assert owner.tensors[bucket].isnan().all() == home.needs_open(bucket)
    with home.open(1, reads=False):
        owner.tensors[1].copy_(values(7))
    with home.open(1, writes=False):
        assert torch.equal(owner.tensors[1], values(7)), owner.tensors[1]
    # Two buckets move in; then each open() reports the bucket when it is brought and again when it has gone.
    assert owner.moves == ([0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1] if is_file else []), owner.moves


def test_states_that_come_while_it_is_open_stay(home: Home) -> None:
    owner = Owner(home)
    home.move_in(0)
    with home.open(0, writes=False):
        owner.tensors[0] = values(5)  # loading a checkpoint makes new tensors too
    with home.open(0, writes=False):
        assert torch.equal(owner.tensors[0], values(5)), owner.tensors[0]


def test_a_stream_changes_every_element_once_in_order(home: Home) -> None:
    owner = Owner(home)
    home.move_in(0)
    sizes = []
    with closing(home.stream(owner.tensors_of(0))) as pieces:
        for (piece,) in pieces:
            begin = sum(sizes)
            assert torch.equal(piece, values(0)[begin : begin + piece.numel()]), (begin, piece)
            piece.mul_(-2)
            sizes.append(piece.numel())
    assert sizes == ([100] * 10 + [31] if home.label == "file" else [N]), sizes
    with home.open(0, writes=False):
        assert torch.equal(owner.tensors[0], values(0) * -2), owner.tensors[0]


def test_only_a_file_takes_large_buckets_in_pieces(home: Home) -> None:
    got = [home.piece_elems(n) for n in (0, SWAP_ELEMS, SWAP_ELEMS + 1)]
    assert got == ([0, 0, SWAP_ELEMS] if home.label == "file" else [0, 0, 0]), got
