"""Files that hold plain data, but in another layout than DeepSpeed's. A read gives a value or a CheckpointError,
whatever types and numbers the file has, at any place."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from deepspeed_c.checkpoint.formats.deepspeed import model_file, open_deepspeed, read, universal
from deepspeed_c.checkpoint.formats.torch_file import StoredTensor, TorchFile
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.checkpoint.formats.deepspeed.memory_source import whole
from tests.deepspeed_c.checkpoint.formats.deepspeed.test_read import FIXTURES, unpack

N_MUTATIONS = 30
# Every tensor of the fixtures is smaller. A shape in a changed file may have any number.
MOST_ELEMS = 1 << 20
JUNK = [
    None, True, -1, 0, 1, 7, 2**70, -(2**63), 1.5, math.nan, "", "text", b"bytes", (), [], {}, [None], {"a": 1},
    {0: {}},
]  # fmt: skip
JUNK += [torch.Size([10**9, 10**9]), (2, -3), range(3)]


def places(value, path=()):
    """Every place in a tree of containers, the root first."""
    yield path
    if isinstance(value, Mapping):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, entry in enumerate(value):
            yield from places(entry, (*path, i))


def changed(value, path, make):
    """Return a copy of ``value`` with the element at ``path`` replaced by ``make(element)``."""
    if not path:
        return make(value)
    key, rest = path[0], path[1:]
    if isinstance(value, Mapping):
        copy = dict(value)
        copy[key] = changed(value[key], rest, make)
        return copy
    entries = list(value)
    entries[key] = changed(entries[key], rest, make)
    return tuple(entries) if isinstance(value, tuple) and not hasattr(value, "_fields") else entries


def mutated(dice: random.Random, content):
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        found = list(places(content))
        path = dice.choice(found)
        kind = dice.randrange(4)
        if kind == 0 and path:  # an element is left out or added

            def make(value, key=path[-1]):
                if isinstance(value, Mapping):
                    return {k: v for k, v in value.items() if k != key}
                return [*value, dice.choice(JUNK)] if isinstance(value, (list, tuple)) else dice.choice(JUNK)

            content = changed(content, path[:-1], make)
        elif kind == 1:  # an element is replaced by another element of the file
            other = content
            for key in dice.choice(found):
                other = other[key]
            content = changed(content, path, lambda _, other=other: other)
        else:
            junk = dice.choice(JUNK)
            content = changed(content, path, lambda _, junk=junk: junk)
    return content


def read_all(folder: Path) -> None:
    source = open_deepspeed(str(folder))
    for kind, name in source.tensors:
        tensor = source.tensors[kind, name]
        assert all(type(n) is int and n >= 0 for n in tensor.shape), tensor
        assert math.prod(tensor.shape) <= MOST_ELEMS, tensor
        whole(source, kind, name)
    repr((source.state, source.groups, source.params, source.aliases, source.topology))
    names = [name for kind, name in source.tensors if kind == "param"]
    source.name_groups([names])


@pytest.mark.parametrize("name", FIXTURES)
def test_what_is_laid_out_otherwise_is_refused_or_read(name, tmp_path, monkeypatch):
    folder, _ = unpack(name, tmp_path)
    tags = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    dice = random.Random(name)
    original = model_file.read_file
    n_refused = 0
    for i in range(N_MUTATIONS):
        seed = dice.random()
        n_read = 0

        def read_changed(path, seed=seed) -> TorchFile:
            nonlocal n_read
            file = original(path)
            n_read += 1
            # About one file in two is changed. Within a case each read of a file gives the same contents.
            of_file = random.Random(f"{seed} {Path(path).name}")
            if of_file.random() < 0.5:
                file.content = mutated(of_file, file.content)
            return file

        monkeypatch.setattr(model_file, "read_file", read_changed)
        monkeypatch.setattr(read, "read_file", read_changed)
        monkeypatch.setattr(universal, "read_file", read_changed)
        try:
            read_all(tags[i % len(tags)])
        except CheckpointError as error:
            n_refused += 1
            assert str(error).strip()
        assert n_read > 0
    assert 0 < n_refused < N_MUTATIONS, n_refused  # some reads are refused and some succeed


def test_stored_tensors_are_leaves():
    assert not issubclass(StoredTensor, (Mapping, list, tuple))
