"""NativeSource on checkpoints that are cut along any dimension: each range equals numpy's slice."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from deepspeed_c.checkpoint.native import state as state_files
from deepspeed_c.checkpoint.native.reader import NativeSource
from deepspeed_c.checkpoint.source import Box, Read
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.checkpoint.handmade import manifest_of, payload_entry, put_manifest, state_entry, write_pieces


def cuts(length: int, n: int) -> list[slice]:
    """Cuts ``length`` into ``n`` parts as even as possible. Some are empty if ``length`` is less than ``n``."""
    return [slice(length * i // n, length * (i + 1) // n) for i in range(n)]


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """The boxes of a tensor that is cut into ``parts`` along each of its dimensions."""
    return list(itertools.product(*(cuts(length, n) for length, n in zip(shape, parts, strict=True))))


def numel(box: tuple[slice, ...]) -> int:
    return math.prod(s.stop - s.start for s in box)


def check_ranges(source: NativeSource, name: str, array: np.ndarray, rng: random.Random, n_ranges: int = 25) -> None:
    """Reads the whole tensor, random flat ranges and random ranges of random boxes in one call, and compares all."""
    tensor = source.tensors["param", name]
    assert tensor.shape == array.shape
    wishes: list[tuple[Box | None, int, np.ndarray]] = [(None, 0, array.reshape(-1))]
    for _ in range(n_ranges):
        begin = rng.randint(0, array.size)
        end = rng.randint(begin, array.size)
        wishes.append((None, begin, array.reshape(-1)[begin:end]))
        starts = [rng.randint(0, length) for length in array.shape]
        stops = [rng.randint(start, length) for start, length in zip(starts, array.shape, strict=True)]
        part = array[tuple(map(slice, starts, stops))].reshape(-1)
        begin = rng.randint(0, part.size)
        end = rng.randint(begin, part.size)
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        wishes.append((Box(tuple(starts), sizes), begin, part[begin:end]))
    # Every third range is converted to another dtype by the read.
    dtypes = [torch.float64 if i % 3 == 2 else tensor.dtype for i in range(len(wishes))]
    reads = [
        Read(tensor, begin, torch.full((expected.size,), 77, dtype=dtype), box)
        for (box, begin, expected), dtype in zip(wishes, dtypes, strict=True)
    ]
    source.read(reads)
    for read, (_, _, expected) in zip(reads, wishes, strict=True):
        actual = read.into.numpy()
        assert np.array_equal(actual, expected.astype(actual.dtype)), (
            f"{name}: {read.begin} of {read.box}: expected {expected[:8]}, got {actual[:8]}"
        )


@pytest.mark.parametrize(
    ("shape", "parts", "n_shards", "dtype"),
    [
        ((13, 17), (3, 1), 1, "float32"),  # cut by rows
        ((13, 17), (1, 4), 1, "float32"),  # cut by columns
        ((13, 17), (3, 4), 1, "int16"),  # cut by both
        ((13, 17), (3, 4), 5, "float32"),  # each box is also cut over data-parallel ranks
        ((64, 96), (2, 3), 4, "float64"),  # a file has several blocks of checksums
        ((5, 7, 11), (1, 3, 1), 1, "float32"),
        ((5, 7, 11), (2, 3, 4), 3, "int16"),
        ((5, 7, 11), (5, 7, 11), 1, "uint8"),  # each element is a box
        ((2, 3), (4, 5), 2, "float32"),  # more ranks than rows, so some boxes are empty
        ((1, 1, 1), (1, 1, 1), 3, "float32"),
        ((6, 0, 4), (2, 1, 2), 2, "float32"),  # no elements
        ((), (), 1, "float32"),  # a single number
        ((257,), (4,), 3, "uint8"),
    ],
)
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_a_tensor_parallel_grid_is_read_like_the_whole(tmp_path, shape, parts, n_shards, dtype, is_shuffled):
    rng = random.Random(repr((shape, parts, n_shards)))
    array = np.random.default_rng(3).permutation(math.prod(shape)).astype(dtype).reshape(shape)
    pieces = [
        (rank % 9, "weight", array, box, part.start, part.stop - part.start)
        for rank, box in enumerate(grid(shape, parts))
        for part in cuts(numel(box), n_shards)
    ]
    if is_shuffled:
        rng.shuffle(pieces)
    files, tensors = write_pieces(tmp_path, pieces)
    topology = {"world_size": len(files), "stage": 1, "tensor_parallel": math.prod(parts)}
    put_manifest(tmp_path, manifest_of(files, tensors, topology=topology))
    with NativeSource(str(tmp_path)) as source:
        assert source.topology.tensor_parallel == math.prod(parts)
        assert source.verify() == []
        check_ranges(source, "weight", array, rng)


def test_pipeline_stages_keep_their_layers_in_files_of_their_own(tmp_path):
    rng = random.Random(5)
    generator = np.random.default_rng(5)
    n_stages, n_tensor, n_data = 3, 2, 2
    arrays, pieces = {}, []
    for stage, layer in itertools.product(range(n_stages), range(2)):
        for kind, shape, parts in (
            ("up.weight", (12, 7), (n_tensor, 1)),
            ("down.weight", (7, 12), (1, n_tensor)),
            (
                "norm.weight",
                (7,),
                (1,),
            ),  # tensor-parallel ranks have the same values; each data-parallel rank saved a part
        ):
            name = f"layers.{2 * stage + layer}.{kind}"
            arrays[name] = generator.standard_normal(shape).astype("float32")
            for tensor_rank, box in enumerate(grid(shape, parts)):
                for data_rank, part in enumerate(cuts(numel(box), n_data)):
                    file = (stage * n_data + data_rank) * n_tensor + tensor_rank
                    pieces.append((file, name, arrays[name], box, part.start, part.stop - part.start))
    files, tensors = write_pieces(tmp_path, pieces)
    topology = {"world_size": len(files), "stage": 1, "tensor_parallel": n_tensor, "pipeline_parallel": n_stages}
    put_manifest(tmp_path, manifest_of(files, tensors, topology=topology))
    with NativeSource(str(tmp_path)) as source:
        assert (source.topology.tensor_parallel, source.topology.pipeline_parallel) == (n_tensor, n_stages)
        assert source.verify() == []
        assert {name for _, name in source.tensors} == set(arrays)
        for name, array in arrays.items():
            check_ranges(source, name, array, rng, n_ranges=6)


def test_of_overlapping_pieces_the_first_one_counts_whatever_is_read(tmp_path):
    rng = random.Random(11)
    shape, n_elems = (6, 10), 60
    layers = [
        (np.arange(60, dtype="float32").reshape(shape) + 1000 * i, begin, end)
        for i, (begin, end) in enumerate([(20, 24), (0, 30), (22, 26), (10, 60), (0, 60)])
    ]
    boxes = [(slice(1, 4), slice(2, 9)), (slice(0, 6), slice(0, 5)), (slice(0, 6), slice(0, 10))]
    expected_flat, expected_boxes = np.full(n_elems, np.nan, "float32"), np.full(shape, np.nan, "float32")
    pieces = []
    for i, (values, begin, end) in enumerate(layers):
        pieces.append((i, "flat", values, None, begin, end - begin))
        free = np.isnan(expected_flat[begin:end])
        expected_flat[begin:end][free] = values.reshape(-1)[begin:end][free]
    for i, box in enumerate(boxes):
        values = np.arange(60, dtype="float32").reshape(shape) + 1000 * i
        pieces.append((i, "boxes", values, box, 0, numel(box)))
        free = np.isnan(expected_boxes[box])
        expected_boxes[box] = np.where(free, values[box], expected_boxes[box])
    files, tensors = write_pieces(tmp_path, pieces)
    put_manifest(tmp_path, manifest_of(files, tensors))
    with NativeSource(str(tmp_path)) as source:
        assert source.verify() == []
        check_ranges(source, "flat", expected_flat.reshape(shape), rng, n_ranges=200)
        check_ranges(source, "boxes", expected_boxes, rng, n_ranges=200)


@pytest.mark.parametrize("missing", range(6))
def test_a_hole_is_named_where_it_is_read_and_nowhere_else(tmp_path, missing):
    array = np.arange(12 * 10, dtype="float32").reshape(12, 10)
    boxes = grid(array.shape, (3, 2))
    pieces = [(0, "weight", array, box, 0, numel(box)) for i, box in enumerate(boxes) if i != missing]
    files, tensors = write_pieces(tmp_path, pieces)
    put_manifest(tmp_path, manifest_of(files, tensors))
    with NativeSource(str(tmp_path)) as source:
        tensor = source.tensors["param", "weight"]
        for i, box in enumerate(boxes):
            wish = Box(tuple(s.start for s in box), tuple(s.stop - s.start for s in box))
            read = Read(tensor, 0, torch.zeros(numel(box)), wish)
            if i == missing:
                with pytest.raises(CheckpointError, match="param of weight .*is incomplete"):
                    source.read([read])
            else:
                source.read([read])
                assert np.array_equal(read.into.numpy(), array[box].reshape(-1))
        assert len(source.verify()) == 1 and "param of weight" in source.verify()[0]


def test_wishes_outside_of_a_tensor_are_refused(tmp_path):
    array = np.arange(12, dtype="float32").reshape(3, 4)
    for box in (None, (slice(0, 3), slice(0, 4))):
        files, tensors = write_pieces(tmp_path, [(0, "weight", array, box, 0, 12)])
        put_manifest(tmp_path, manifest_of(files, tensors))
        with NativeSource(str(tmp_path)) as source:
            tensor = source.tensors["param", "weight"]
            for begin, n, wish in (
                *((1, 12, None), (-1, 4, None), (12, 1, None), (0, 5, Box((0, 0), (2, 2)))),
                *((0, 4, Box((2, 3), (2, 2))), (0, 4, Box((-1, 0), (2, 2))), (0, 4, Box((0,), (4,)))),
            ):
                with pytest.raises(CheckpointError, match="weight"):
                    source.read([Read(tensor, begin, torch.zeros(n), wish)])


def test_a_damaged_block_names_the_tensors_in_it_and_others_are_read(tmp_path):
    arrays = {name: np.full(1500, i, "float32") for i, name in enumerate("abcd")}
    files, tensors = write_pieces(tmp_path, [(0, name, array, None, 0, 1500) for name, array in arrays.items()])
    put_manifest(tmp_path, manifest_of(files, tensors))
    path = Path(tmp_path, "rank_00000.safetensors")
    content = bytearray(path.read_bytes())
    offset = tensors[2]["pieces"][0][1]
    at = offset + 3000
    content[at] ^= 1
    path.write_bytes(content)
    begin, end = at // 4096 * 4096, at // 4096 * 4096 + 4096
    inside = [t["name"] for t in tensors if t["pieces"][0][1] < end and t["pieces"][0][1] + 1500 * 4 > begin]
    with NativeSource(str(tmp_path)) as source:
        problems = source.verify()
        assert len(problems) == 1 and f"bytes {begin} to {min(end, len(content))}" in problems[0]
        for name, array in arrays.items():
            assert (f"param of {name}" in problems[0]) == (name in inside), problems
            into = torch.zeros(1500)
            if name in inside:
                with pytest.raises(CheckpointError, match=f"param of {name}") as raised:
                    source.read([Read(source.tensors["param", name], 0, into)])
                assert str(path) in str(raised.value)
            else:
                source.read([Read(source.tensors["param", name], 0, into)])
                assert into.tolist() == array.tolist()
    # Write the manifest anew with matching checksums, so that the change does not count as damage.
    put_manifest(tmp_path, manifest_of([payload_entry(path.name, bytes(content))], tensors))
    with NativeSource(str(tmp_path)) as source:
        assert source.verify() == []


def test_signed_state_of_other_types_is_refused(tmp_path):
    odd = {
        "holds a list and no dict": [1],
        "client_state is a int and no dict": {"client_state": 5},
        "extra_state is a str and no dict": {"extra_state": "x"},
        "groups is a dict and no list": {"groups": {}},
        "group 1 of the optimizer is no dict": {"groups": [{"lr": 1.0}, 5]},
        "group 0 of the optimizer is no dict of options": {"groups": [{1: 1.0}]},
        "loss_scaler is a float and no dict": {"loss_scaler": 1.0},
    }
    for at, (reason, content) in enumerate(odd.items()):
        for name in ("state.pt", "rank_00000.pt"):
            folder = tmp_path / f"{at}{name}"
            folder.mkdir()
            packed = {"state.pt": state_files.pack({}, ""), "rank_00000.pt": state_files.pack({}, "")}
            packed[name] = state_files.pack(content, "")
            for file, data in packed.items():
                (folder / file).write_bytes(data)
            put_manifest(folder, manifest_of([], [], states=[state_entry(*item) for item in packed.items()]))
            if name != "state.pt" and isinstance(content, dict):
                continue  # only the engine knows the entries of this file of a rank
            with pytest.raises(CheckpointError, match=reason) as raised, NativeSource(str(folder)) as source:
                source.rank_state(0)
            assert raised.value.where == str(folder / name)
