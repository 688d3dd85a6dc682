"""Megatron's files for any number of ranks: tensors that the loaders merge or split equal those of a whole model that
the tests cut by slices."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_c.checkpoint.formats.megatron import MegatronSDLoader, SDLoaderFactory
from deepspeed_c.errors import CheckpointError

PYTHON = os.environ.get("DSC_PEER_PYTHON", "")
HEADS, WIDTH, HIDDEN, INNER, WORDS = 12, 2, 24, 48, 36
VERSIONS = (0, 1.0, 2.0)


def whole(version: float) -> dict[str, torch.Tensor]:
    """A model of two layers. ``version`` decides the order of queries, keys and values: by part, head and column, or by
    head first."""
    rng = torch.Generator().manual_seed(int(version))

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    weights = {"word_embeddings.weight": make(WORDS, HIDDEN), "position_embeddings.weight": make(8, HIDDEN)}
    for layer in range(2):
        at = f"transformer.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": make(HIDDEN),
            f"{at}.attention.query_key_value.weight": make(3 * HIDDEN, HIDDEN),
            f"{at}.attention.query_key_value.bias": make(3 * HIDDEN),
            f"{at}.attention.dense.weight": make(HIDDEN, HIDDEN),
            f"{at}.attention.dense.bias": make(HIDDEN),
            f"{at}.mlp.dense_h_to_4h.weight": make(INNER, HIDDEN),
            f"{at}.mlp.dense_h_to_4h.bias": make(INNER),
            f"{at}.mlp.dense_4h_to_h.weight": make(HIDDEN, INNER),
            f"{at}.mlp.dense_4h_to_h.bias": make(HIDDEN),
        }
    return weights


def part(name: str, value: torch.Tensor, version: float, world: int, rank: int) -> torch.Tensor:
    """The part of a rank, picked element by element along the cut dimension."""
    if "query_key_value" in name:
        rows = range(3 * HEADS * WIDTH)
        if version == 0:  # (part, head, column)
            mine = [row for row in rows if row // WIDTH % HEADS * world // HEADS == rank]
        else:  # the index of the head changes slowest
            mine = [row for row in rows if row // (3 * WIDTH) * world // HEADS == rank]
        return value[mine]
    if name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
        columns = value.shape[1]
        return value[:, [column for column in range(columns) if column * world // columns == rank]]
    if "dense_h_to_4h" in name or "word_embeddings" in name:
        return value[[row for row in range(len(value)) if row * world // len(value) == rank]]
    return value


def write(folder: Path, version: float, world: int, key: str = "module") -> list[str]:
    files = []
    for rank in range(world):
        weights = {name: part(name, value, version, world, rank).clone() for name, value in whole(version).items()}
        content: dict[str, Any] = {"mp_world_size": world, "iteration": 7, "checkpoint_version": version, key: weights}
        if version == 0:
            del content["checkpoint_version"]
        files.append(str(folder / f"mp_rank_{rank:02d}_model_states.pt"))
        torch.save(content, files[-1])
    return files


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (6, 1), (1, 6), (3, 6), (4, 4)])
def test_any_number_of_ranks_loads_any_other(tmp_path: Path, version: float, saved: int, loaded: int) -> None:
    files = write(tmp_path, version, saved, "model" if saved == 1 else "module")
    loader = SDLoaderFactory.get_sd_loader(files)
    for rank in range(loaded):
        path, content, (scales, n_merged) = loader.load(loaded, rank)
        assert path == files[rank * saved // loaded] and scales is None and n_merged == max(saved // loaded, 1)
        weights = loader.get_module(content)
        assert list(weights) == list(whole(version)) and content["iteration"] == 7
        for name, value in whole(version).items():
            assert torch.equal(weights[name], part(name, value, version, loaded, rank)), (name, rank)


def test_a_version_that_is_given_counts(tmp_path: Path) -> None:
    files = write(tmp_path, 2.0, 2)
    name = "transformer.layers.0.attention.query_key_value.weight"
    as_later = SDLoaderFactory.get_sd_loader(files, version=1.0).load(1, 0)[1]["module"][name]
    as_first = SDLoaderFactory.get_sd_loader(files, version=0).load(1, 0)[1]["module"][name]
    assert torch.equal(as_later, whole(2.0)[name]) and not torch.equal(as_first, as_later)


def test_lists_of_files_come_from_json(tmp_path: Path) -> None:
    files = write(tmp_path, 1.0, 2)
    data = {"type": "Megatron", "version": 1.0, "checkpoints": files}
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps(data))
    for source in (data, str(listed)):
        loader = SDLoaderFactory.get_sd_loader_json(source, None)
        assert isinstance(loader, MegatronSDLoader) and loader.load(1, 0)[2] == (None, 2)
    bloom = {**data, "type": "BLOOM"}
    assert SDLoaderFactory.get_sd_loader_json(bloom) is bloom


def test_pipelines_and_plain_state_dicts(tmp_path: Path) -> None:
    files = write(tmp_path, 0, 2)
    loader = SDLoaderFactory.get_sd_loader(files)
    assert loader.load(4, 3, module_key="module", is_pipe_parallel=True)[0] == files[0]
    plain = [str(tmp_path / f"layer_00-model_0{rank}.pt") for rank in range(2)]
    for rank, file in enumerate(plain):
        torch.save({name: part(name, value, 0, 2, rank).clone() for name, value in whole(0).items()}, file)
    _, weights, _ = SDLoaderFactory.get_sd_loader(plain).load(1, 0, module_key=None)
    assert all(torch.equal(weights[name], value) for name, value in whole(0).items())


def test_an_engine_of_checkpoints_reads_where_one_is_given(tmp_path: Path) -> None:
    read: list[str] = []

    class Engine:
        def load(self, path: str, map_location: Any) -> Any:
            read.append(path)
            return torch.load(path, map_location=map_location)

    files = write(tmp_path, 1.0, 2)
    SDLoaderFactory.get_sd_loader(files, Engine()).load(2, 1)
    assert files[1] in read


class Bomb:
    """A hostile object in a file: unpickling it would make a folder."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("executed",)


def test_no_pickle_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"module": {"a": torch.zeros(2)}, "args": Bomb()}, "bomb.pt")
    Path("bomb.pkl").write_bytes(pickle.dumps(Bomb()))
    for file in ("bomb.pt", "bomb.pkl"):
        with pytest.raises(CheckpointError):
            SDLoaderFactory.get_sd_loader([file]).load(1, 0)
    assert not Path("executed").exists()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    for folder in ("three", "two", "other", "odd"):
        (tmp_path / folder).mkdir()
    three, two = write(tmp_path / "three", 1.0, 3), write(tmp_path / "two", 1.0, 2)
    loader = SDLoaderFactory.get_sd_loader(two)
    both = {"module": {}, "model": {}}
    torch.save(both, tmp_path / "both.pt")
    torch.save({"model": {"a": torch.zeros(2)}}, tmp_path / "other" / "a.pt")
    torch.save({"module": {"mlp.dense_h_to_4h.weight": torch.zeros(5, 2)}}, tmp_path / "odd" / "a.pt")
    unlike = [two[0], str(tmp_path / "unlike.pt")]
    content = torch.load(two[1])
    del content["module"]["word_embeddings.weight"]
    torch.save(content, unlike[1])
    for act, text in (
        (lambda: SDLoaderFactory.get_sd_loader([]), "there are no files"),
        (lambda: SDLoaderFactory.get_sd_loader(three[:2]), "was saved by 3 ranks, and 2 files"),
        (lambda: SDLoaderFactory.get_sd_loader(two, sd_type="Bert"), "'Bert' is no kind"),
        (lambda: SDLoaderFactory.get_sd_loader_json({"type": "Megatron"}), "has no 'checkpoints'"),
        (lambda: SDLoaderFactory.get_sd_loader_json(str(tmp_path / "none.json")), "cannot be read"),
        (lambda: SDLoaderFactory.get_sd_loader([str(tmp_path / "none.pt")]), "none.pt"),
        (lambda: loader.load(3, 0), "3 is no multiple of 2"),
        (lambda: loader.load(2, 2), "no rank 2 among 2"),
        (lambda: loader.load(2, 0, quantize=True), "int8"),
        (lambda: SDLoaderFactory.get_sd_loader(two, version=5).load(1, 0), "version 5 is not known"),
        (lambda: SDLoaderFactory.get_sd_loader([str(tmp_path / "both.pt")]).load(2, 0), "module and model"),
        (
            lambda: SDLoaderFactory.get_sd_loader([str(tmp_path / "other" / "a.pt")] * 2).load(1, 0),
            "has no attention.dense.weight",
        ),
        (
            lambda: SDLoaderFactory.get_sd_loader([str(tmp_path / "odd" / "a.pt")]).load(2, 0),
            "5 elements along dimension 0 are not 2 equal parts",
        ),
        (lambda: SDLoaderFactory.get_sd_loader(unlike).load(1, 0), "do not both hold word_embeddings.weight"),
    ):
        with pytest.raises(CheckpointError, match=text):
            act()


PEER = """
import json, sys, torch
from deepspeed.runtime.state_dict_factory import SDLoaderFactory
for files, world, out in json.loads(sys.argv[1]):
    loader = SDLoaderFactory.get_sd_loader(files, None)
    torch.save([loader.load(world, rank)[1]["module"] for rank in range(world)], out)
"""


@pytest.mark.skipif(not PYTHON, reason="DSC_PEER_PYTHON names no Python that has DeepSpeed")
def test_deepspeed_loads_the_same(tmp_path: Path) -> None:
    jobs = []
    for version in VERSIONS:
        for saved, loaded in ((4, 2), (2, 4), (2, 2)):
            folder = tmp_path / f"{version}-{saved}-{loaded}"
            folder.mkdir()
            jobs.append((write(folder, version, saved), loaded, str(folder / "theirs")))
    subprocess.run([PYTHON, "-c", PEER, json.dumps(jobs)], check=True, capture_output=True, timeout=300)
    for files, loaded, out in jobs:
        loader = SDLoaderFactory.get_sd_loader(files)
        for rank, theirs in enumerate(torch.load(out)):
            ours = loader.load(loaded, rank)[1]["module"]
            assert list(ours) == list(theirs)
            assert all(torch.equal(ours[name], value) for name, value in theirs.items())
