"""``engine.send_weights``: a folder, a function and a process group take changed weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_c.errors import CheckpointError, CommError, ConfigError, StateError
from deepspeed_c.transfer import WeightsFolder, receive_weights
from tests.ranks import run_ranks
from tests.toys import llama
from tests.training import config, engine_of, step

transformers = pytest.importorskip("transformers")

VOCAB = 31
SMALL = {"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30}


def make(frozen: bool = False) -> Any:
    model = llama(2, vocab_size=VOCAB, max_position_embeddings=64, tie_word_embeddings=True)
    if frozen:
        model.requires_grad_(False)
        model.model.norm.weight.requires_grad_(True)
    return model


def engine_at(stage: int, *, frozen: bool = False) -> Any:
    return engine_of(make(frozen), config(stage, zero=SMALL))


def train(engine: Any, rank: int) -> None:
    tokens = torch.randint(3, VOCAB, (1, 5), generator=torch.Generator().manual_seed(rank))
    step(engine, input_ids=tokens, labels=tokens)


def whole(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


# -- a folder ------------------------------------------------------------------------------------------------------------------


def folder_body(rank: int, world: int, folder: str, stage: int) -> Any:
    sent, received = [], WeightsFolder(folder)
    held: dict[str, torch.Tensor] = {}
    has: int | None = None
    with engine_at(stage, frozen=True) as engine:
        for _ in range(3):
            sent.append(engine.send_weights(folder))
            names = []
            for name, tensor in received.load(has):
                names.append(name)
                held[name] = tensor
            has = received.version
            assert same(held, whole(engine)), held.keys()
            sent.append(names)
            engine._comm.barrier()
            train(engine, rank)
        with pytest.raises(StateError) as caught:
            engine.send_weights(folder, version=3)
        assert received.version == 3
        again = engine.send_weights(folder, version=7, changed_only=False)
        assert same(dict(received.load()), whole(engine))
        return sent, str(caught.value), again, sorted(os.listdir(folder))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_folder_has_the_newest_version_and_what_changed(tmp_path, stage):
    folder = str(tmp_path / "weights")
    for sent, refused, again, files in run_ranks(2, folder_body, folder, stage):
        first, names, second, changed, third, _ = sent
        assert (first.version, second.version, third.version) == (1, 2, 3)
        assert not first.is_delta and second.is_delta and third.is_delta, sent
        assert first.n_tensors == len(names) and "lm_head.weight" in names
        assert changed == ["model.norm.weight"] and second.n_tensors == 1, changed
        assert second.n_bytes == 24 * 4, second
        assert "version 3" in refused, refused
        assert again.version == 7 and not again.is_delta and again.n_tensors == first.n_tensors
        # The last list needs one file, and a reader of the list before may still read three.
        assert files == [
            "weights-00000001.safetensors",
            "weights-00000003.safetensors",
            "weights-00000007.safetensors",
            "weights.json",
        ]


def one_version(folder: str) -> None:
    with engine_at(0) as engine:
        engine.send_weights(folder)


def one_body(rank: int, world: int, folder: str) -> None:
    one_version(folder)


def test_a_reader_is_told_what_is_wrong(tmp_path):
    folder = tmp_path / "weights"
    received = WeightsFolder(folder)
    assert received.version is None
    with pytest.raises(CheckpointError, match="holds no weights"):
        received.load()
    run_ranks(1, one_body, str(folder))
    with pytest.raises(StateError, match="version 5 was read before"):
        received.load(since=5)
    assert list(received.load(since=1)) == []
    known = set(make().state_dict()) - {"model.norm.weight"} | {"model.norms.weight"}
    with pytest.raises(StateError, match="'model.norm.weight' is unknown.*nearest: 'model.norms.weight'"):
        received.load(known=known)
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="has checksum"):
        dict(received.load())
    listed = folder / "weights.json"
    for text in (
        "",
        "{}",
        "[]",
        '{"version": 1, "tensors": {"a": ["../a", 1, 1, null]}}',
        '{"version": "1", "tensors": {}}',
    ):
        listed.write_text(text)
        with pytest.raises(CheckpointError):
            received.load()


def no_room_body(rank: int, world: int, folder: str) -> Any:
    with engine_at(3) as engine:
        engine.send_weights(folder)
        before = json.loads(Path(folder, "weights.json").read_text())
        train(engine, rank)
        os.rename(folder, f"{folder}.away") if rank == 0 else None
        if rank == 0:
            Path(folder).write_text("a file where the folder was")
        engine._comm.barrier()
        said = []
        with pytest.raises((CheckpointError, CommError, OSError)) as caught:
            engine.send_weights(folder)
        said.append(str(caught.value))
        engine._comm.barrier()
        if rank == 0:
            os.unlink(folder)
            os.rename(f"{folder}.away", folder)
        engine._comm.barrier()
        assert json.loads(Path(folder, "weights.json").read_text()) == before
        sent = engine.send_weights(folder)
        assert same(dict(WeightsFolder(folder).load()), whole(engine))
        return said, sent


def test_a_folder_that_fails_is_an_error_on_all_ranks(tmp_path):
    for said, sent in run_ranks(2, no_room_body, str(tmp_path / "weights")):
        assert said and said[0], said
        assert (sent.version, sent.is_delta) in ((2, False), (2, True)), sent


# -- a function ----------------------------------------------------------------------------------------------------------------


class Receiver:
    def __init__(self, fails_at: int = -1) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.n, self.fails_at = 0, fails_at

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.n += 1
        if self.n == self.fails_at:
            raise ValueError(f"no room for {name}")
        self.held[name] = tensor.clone()


def function_body(rank: int, world: int, stage: int) -> Any:
    receiver, other = Receiver(), Receiver(fails_at=3)
    with engine_at(stage) as engine:
        first = engine.send_weights(receiver.load)
        want = whole(engine)
        assert rank or same(receiver.held, want)
        nothing = engine.send_weights(receiver.load)
        with pytest.raises(ValueError if rank == 0 else CommError) as caught:
            engine.send_weights(other.load)
        train(engine, rank)
        want = whole(engine)
        second = engine.send_weights(receiver.load)
        whole_again = engine.send_weights(other.load)
        assert rank or (same(receiver.held, want) and same(other.held, want))
        with pytest.raises(ConfigError) as refused:
            engine.send_weights(7)
        return first, nothing, second, whole_again, str(caught.value), str(refused.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_function_gets_what_changed_and_its_failure_is_the_senders(stage):
    outcome = run_ranks(2, function_body, stage)
    for first, nothing, second, whole_again, _, refused in outcome:
        assert (nothing.n_tensors, nothing.n_bytes, nothing.is_delta) == (0, 0, True), nothing
        assert first.n_bytes == second.n_bytes > 0 and second.is_delta
        assert not whole_again.is_delta and whole_again.n_tensors == first.n_tensors
        assert "is 7" in refused, refused
    assert "no room for" in outcome[0][4] and "rank 0" in outcome[1][4]


def many_body(rank: int, world: int) -> Any:
    """A new function for each call, as a lambda in a loop is."""
    receiver = Receiver()
    with engine_at(3) as engine:
        for _ in range(20):
            sent = engine.send_weights(lambda name, tensor: receiver.load(name, tensor))
            assert not sent.is_delta and sent.version == 1
        known = len(engine._sender._targets), len(engine._sender._newest), len(engine._sender._last)
        first = engine.send_weights(receiver.load)
        again = engine.send_weights(receiver.load)
        bad = Receiver(fails_at=1)
        with pytest.raises((ValueError, CommError)):
            engine.send_weights(bad.load)
        after = engine.send_weights(bad.load)
        return known, (first.is_delta, again.is_delta, again.version), (after.version, after.is_delta)


def test_receivers_are_not_remembered_without_end_and_versions_never_go_back():
    for rank, (known, sent, after) in enumerate(run_ranks(2, many_body)):
        assert known == ((16, 16, 16) if rank == 0 else (0, 0, 16)), known
        assert sent == (False, True, 2), sent
        assert after == (2, False), after


# -- a process group -----------------------------------------------------------------------------------------------------------


def receive(group: Any, load: Callable[..., Any], **more: Any) -> Any:
    try:
        return receive_weights(group, load, **more)
    except (CommError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def group_body(rank: int, world: int, stage: int) -> Any:
    """Ranks 0 and 1 train; ranks 2 and 3 are two engines for text."""
    trainers = dist.new_group([0, 1])
    group = dist.new_group([0, 2, 3])
    said: list[Any] = []
    known = set(make().state_dict())
    if rank < 2:
        with engine_of(make(), config(stage, zero=SMALL), dist_init_required=False, **of_group(trainers)) as engine:
            for number in range(6):
                try:
                    said.append(engine.send_weights(group if rank == 0 else None))
                except CommError as error:
                    said.append(str(error))
                if number in (0, 1, 3):
                    train(engine, rank)
            return said, whole(engine)
    receiver = Receiver()
    version = None
    for number in range(6):
        before = receiver.n
        if number == 2 and rank == 3:
            found = receive(group, Receiver(fails_at=2).load, version=version, known=known)
        elif number == 4 and rank == 2:
            found = receive(group, receiver.load, version=version, known={"model.embed_token.weight"})
        else:
            found = receive(group, receiver.load, version=version, known=known)
        said.append((found, receiver.n - before))
        version = found if isinstance(found, int) else None
    return said, receiver.held


def of_group(trainers: Any) -> dict[str, Any]:
    from torch.distributed.device_mesh import DeviceMesh

    return {"mesh_device": DeviceMesh.from_group(trainers, "cpu", mesh_dim_names=("data_parallel",))}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_group_receives_and_its_failures_are_the_senders(stage):
    (sent, want), _, (two, held_2), (three, held_3) = run_ranks(4, group_body, stage)
    print(sent, two, three)
    assert same(held_2, want) and same(held_3, want)
    assert [found for found, _ in two[:2]] == [1, 2]
    assert two[1][1] > 0 and sent[1].is_delta
    assert "no room for" in sent[2] and "rank 2 of the group" in sent[2], sent
    assert "ValueError" in three[2][0]
    assert not sent[3].is_delta and sent[3].n_tensors == sent[0].n_tensors
    assert "'model.embed_tokens.weight' is unknown (nearest: 'model.embed_token.weight')" in sent[4], sent
    assert two[4][1] == three[4][1] == 0
    assert not sent[5].is_delta
    assert [each.version for each in sent if not isinstance(each, str)] == [1, 2, 4, 6], sent
