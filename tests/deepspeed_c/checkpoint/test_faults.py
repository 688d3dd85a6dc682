"""An engine on disks that fill up, with writes and reads that fail, and with damaged files. The earlier checkpoint is
always there and whole."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed_c
from deepspeed_c import _C, errors
from deepspeed_c.checkpoint.native import save as saving
from deepspeed_c.checkpoint.tools import cli
from deepspeed_c.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.log_lines import LogLines
from tests.ranks import run_ranks
from tests.training import whole_weights
from tests.waits import LIMIT_SECONDS

WORLD = 2
# The payload of each rank has more than two blocks of checksums.
WIDTH = 301


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, 7).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        return (self.down(hidden) + self.frozen(hidden)).float().pow(2).mean()


def make(stage: int, dtype: str, **config: Any):
    torch.manual_seed(stage)
    settings = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 14},
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}), **config,
    }  # fmt: skip
    return deepspeed_c.initialize(model=Net(), config=settings)[0]


def train(engine, n_steps: int) -> list[float]:
    """Runs steps on batches that depend on the number of the step and on the rank. Returns the losses."""
    losses = []
    for _ in range(n_steps):
        generator = torch.Generator().manual_seed(100 * engine.global_steps + engine.global_rank)
        loss = engine(torch.randn(2, WIDTH, generator=generator).to(next(engine.module.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def digest(engine) -> str:
    """Return a digest of all whole weights, masters and moments, and of the counters. Collective."""
    found = hashlib.sha256()
    for _, tensor in sorted(whole_weights(engine.module).items()):
        found.update(tensor.contiguous().view(torch.uint8).numpy())
    for param in engine.module.parameters():
        if param.requires_grad:
            found.update(safe_get_full_fp32_param(param).numpy())
            for key in ("exp_avg", "exp_avg_sq"):
                found.update(safe_get_full_optimizer_state(param, key).numpy())
    found.update(repr((engine.global_steps, engine.global_samples, engine.micro_steps)).encode())
    return found.hexdigest()


def files_in(folder: str) -> dict[str, str]:
    """Path -> digest, of all files and folders, hidden ones included."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in Path(folder).rglob("*")
    }


# -- saving --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def short_files(n_bytes: int) -> Iterator[None]:
    """Within the context no file of this process may grow beyond ``n_bytes``. The system fails with EFBIG in the middle
    of a write, as on a file system with such a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refuses(function: Callable, is_bad: Callable[[str], bool], code: int) -> Callable:
    """Wraps ``function`` so that it fails with ``code`` if ``is_bad`` accepts its first argument, a path."""

    def wrapped(path: str, *args: Any, **kwargs: Any) -> Any:
        if is_bad(str(path)):
            raise OSError(code, os.strerror(code), str(path))
        return function(path, *args, **kwargs)

    return wrapped


class FullAtTheEnd:
    """A BlockWriter that fails at its end: the last bytes do not reach the disk, as network file systems may report."""

    def __init__(self, *args: Any) -> None:
        self._path, self._writer = args[0], BLOCK_WRITER(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def finish(self) -> bytes:
        self._writer.finish()
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), self._path)


BLOCK_WRITER = _C.BlockWriter


def write_fails_for(name: str, code: int) -> contextlib.AbstractContextManager:
    return replaced(
        saving, "write_durably", refuses(saving.write_durably, lambda path: os.path.basename(path) == name, code)
    )


# The failure -> (its rank, its errno, the fault to inject).
SAVE_FAULTS: dict[str, tuple[int, int, Callable[[], contextlib.AbstractContextManager]]] = {
    "a write of rank 1 stops in the midst of a block": (1, errno.EFBIG, lambda: short_files(300_001)),
    "a write of rank 0 stops in the header": (0, errno.EFBIG, lambda: short_files(100)),
    "the last bytes of rank 1": (1, errno.EDQUOT, lambda: replaced(_C, "BlockWriter", FullAtTheEnd)),
    "rank_00001.pt": (1, errno.ENOSPC, lambda: write_fails_for("rank_00001.pt", errno.ENOSPC)),
    "state.pt": (0, errno.ENOSPC, lambda: write_fails_for("state.pt", errno.ENOSPC)),
    "manifest.json": (0, errno.EIO, lambda: write_fails_for("manifest.json", errno.EIO)),
    "manifest.crc32c": (0, errno.ENOSPC, lambda: write_fails_for("manifest.crc32c", errno.ENOSPC)),
    "the hidden folder": (0, errno.EROFS, lambda: replaced(os, "mkdir", refuses(os.mkdir, is_hidden, errno.EROFS))),
}
# These faults happen when the checkpoint gets its name: by a rename if the tag is new, by an exchange if it exists.
NAME_FAULTS = {
    "new": (0, errno.EIO, lambda: replaced(os, "rename", refuses(os.rename, is_hidden, errno.EIO))),
    "good": (0, errno.EIO, lambda: replaced(_C, "exchange_paths", refuses(_C.exchange_paths, is_hidden, errno.EIO))),
}


def is_hidden(path: str) -> bool:
    return os.path.basename(path).startswith(".")


def failing_saves(rank: int, world: int, folder: str, stage: int, dtype: str) -> list[str]:
    problems = []
    with make(stage, dtype) as engine:
        train(engine, 2)
        engine.save_checkpoint(folder, tag="good", client_state={"epoch": 3})
        good, files = digest(engine), files_in(folder)
        dist.barrier()
        train(engine, 1)
        ahead = digest(engine)
        # An asynchronous save writes in the same way. An existing tag is replaced by another system call.
        for tag, is_async in (("new", False), ("good", True)):
            for name, (victim, code, fault) in {**SAVE_FAULTS, f"its name: {tag}": NAME_FAULTS[tag]}.items():
                where = f"{name}, tag {tag}, async {is_async}"
                with fault() if rank == victim else contextlib.nullcontext():
                    message = failure_of(engine, folder, tag, is_async)
                everyone = engine._comm.gather_objects(message)
                if len(set(everyone)) != 1:
                    problems.append(f"{where}: the ranks say {everyone}")
                for part in (f"rank {victim}: ", os.strerror(code), folder, "\nFix: "):
                    if part not in message:
                        problems.append(f"{where}: {part!r} is not in {message!r}")
                dist.barrier()
                if (found := files_in(folder)) != files:
                    problems.append(f"{where}: {sorted(found.items() ^ files.items())}")
                dist.barrier()
        if digest(engine) != ahead:
            problems.append("failed saves have changed the engine")
        continued = train(engine, 1)
        path, client_state = engine.load_checkpoint(folder)
        if path != os.path.join(folder, "good") or client_state != {"epoch": 3} or digest(engine) != good:
            problems.append(f"{path} with {client_state} is not what was saved")
        if train(engine, 2)[1:] != continued:
            problems.append("training does not go on as without failed saves")
        # A save with the same name by the same engine succeeds as soon as there is room.
        engine.save_checkpoint(folder, tag="new")
        last = digest(engine)
        train(engine, 1)
        engine.load_checkpoint(folder)
        if digest(engine) != last:
            problems.append("the save after the failed ones is not what was saved")
        dist.barrier()
        if any(is_hidden(name) for name in os.listdir(folder)):
            problems.append(f"left behind: {os.listdir(folder)}")
    return problems


def failure_of(engine, folder: str, tag: str, is_async: bool) -> str:
    try:
        saved = engine.save_checkpoint(folder, tag=tag, is_async=is_async)
        if is_async:
            saved.wait()
    except errors.CheckpointError as error:
        with contextlib.suppress(errors.CheckpointError):
            engine.wait_checkpoint()  # raises the error once more
        return str(error)
    return "it was saved"


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (3, "bf16")])
def test_a_failed_write_of_one_rank_fails_the_save_of_all_and_costs_nothing(tmp_path, stage, dtype):
    for problems in run_ranks(WORLD, failing_saves, str(tmp_path / "ckpt"), stage, dtype):
        assert problems == []


def full_disk(rank: int, world: int, folder: str) -> list[str]:
    problems = []
    with make(1, "fp32") as engine:
        train(engine, 1)
        engine.save_checkpoint(folder, tag="good")
        good = digest(engine)
        train(engine, 1)
        for left in (1 << 12, 1 << 18, 3 << 18):
            filler, n_filled = Path(folder, "filler"), 0
            if rank == 0:
                n_filled = max(shutil.disk_usage(folder).free - left, 0)
                filler.write_bytes(bytes(n_filled))
            dist.barrier()
            before = sorted(os.listdir(folder))
            dist.barrier()
            message = failure_of(engine, folder, "new", False)
            if os.strerror(errno.ENOSPC) not in message:
                problems.append(f"{left} bytes left: {message}")
            dist.barrier()
            if sorted(os.listdir(folder)) != before:
                problems.append(f"{left} bytes left: {before} became {os.listdir(folder)}")
            dist.barrier()
            if rank == 0:
                filler.unlink()
        dist.barrier()
        engine.load_checkpoint(folder)
        if digest(engine) != good:
            problems.append("the checkpoint before is not what was saved")
        engine.save_checkpoint(folder, tag="new")
    return problems


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MiB, with room for two checkpoints and not for three."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(where)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False, timeout=LIMIT_SECONDS).returncode != 0
    ):
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield str(where)
    subprocess.run(["umount", "--lazy", str(where)], check=True, timeout=LIMIT_SECONDS)


def test_a_full_disk_fails_the_save_and_costs_nothing(small_disk):
    for problems in run_ranks(WORLD, full_disk, small_disk):
        assert problems == []


def failing_latest(rank: int, world: int, folder: str) -> list[str]:
    problems = []
    with make(1, "fp32") as engine:
        train(engine, 1)
        engine.save_checkpoint(folder, tag="good")
        good = digest(engine)
        train(engine, 1)
        ahead = digest(engine)
        bad_replace = refuses(os.replace, lambda path: ".latest." in os.path.basename(path), errno.ENOSPC)
        for is_async in (False, True):
            with replaced(os, "replace", bad_replace) if rank == 0 else contextlib.nullcontext():
                message = failure_of(engine, folder, "new", is_async)
            everyone = engine._comm.gather_objects(message)
            if len(set(everyone)) != 1:
                problems.append(f"the ranks say {everyone}")
            for part in ("is complete", "latest", os.strerror(errno.ENOSPC), "rank 0"):
                if part not in message:
                    problems.append(f"{part!r} is not in {message!r}")
            if "was not written" in message:
                problems.append(f"a complete checkpoint is said not to be there: {message!r}")
            dist.barrier()
            if sorted(os.listdir(folder)) != ["good", "latest", "new", "zero_to_fp32.py"] and rank == 0:
                problems.append(f"left behind: {os.listdir(folder)}")
        path, _ = engine.load_checkpoint(folder)
        if os.path.basename(path) != "good" or digest(engine) != good:
            problems.append(f"without a tag {path} was loaded")
        engine.load_checkpoint(folder, tag="new")
        if digest(engine) != ahead:
            problems.append("the tag is not what was saved")
    return problems


def test_a_checkpoint_that_latest_could_not_name_is_complete_and_said_to_be(tmp_path):
    for problems in run_ranks(WORLD, failing_latest, str(tmp_path / "ckpt")):
        assert problems == []


# -- loading -------------------------------------------------------------------------------------------------------------

# File -> whether it is damaged in every way. The checksum file, and files that differ from another only by their rank,
# are damaged in two ways.
FILES = {
    "manifest.json": True, "manifest.crc32c": False, "rank_00000.safetensors": False, "rank_00001.safetensors": True,
    "state.pt": True, "rank_00000.pt": False, "rank_00001.pt": True,
}  # fmt: skip
FEW_DAMAGES = ("removed", "flipped in the last byte")


def entries_of(content: bytes) -> dict[str, tuple[int, int]]:
    """Name in a safetensors file -> where its bytes lie, by the definition of the format."""
    n_header = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n_header])
    return {
        name: (8 + n_header + entry["data_offsets"][0], 8 + n_header + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def damages(content: bytes, name: str) -> Iterator[tuple[str, bytes | None, str]]:
    """Yield (kind of damage, the damaged contents or None, a text that the message has to contain besides the file's
    name)."""
    if name == "manifest.crc32c":
        content = content.rstrip(b"\n")  # the newline does not matter
    yield "removed", None, os.strerror(errno.ENOENT)
    yield "one byte shorter", content[:-1], ""
    yield "one byte longer", content + b"0", ""
    yield "zeros", bytes(len(content)), ""
    places = {"middle": len(content) // 2, "last": len(content) - 1}
    for where, at in places.items():
        tensor = ""
        if name.endswith(".safetensors"):
            found = [entry for entry, (low, high) in entries_of(content).items() if low <= at < high]
            tensor = " of ".join(found[0].partition("[")[0].split(":", 1)) if found else "bytes 0 to "
        yield f"flipped in the {where} byte", content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :], tensor


def refusal(action: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        result = action()
    except kind as error:
        return str(error)
    return f"{result} came back, and no {kind.__name__}"


def damaged_files(rank: int, world: int, folder: str, stage: int, dtype: str, names: dict[str, bool]) -> list[str]:
    problems = []

    def check(is_right: bool, what: str) -> None:
        if not is_right:
            problems.append(f"{where}: {what}")

    with make(stage, dtype) as engine:
        train(engine, 1)
        engine.save_checkpoint(folder, tag="old", client_state={"is": "old"})
        old = digest(engine)
        train(engine, 1)
        engine.save_checkpoint(folder, tag="new", client_state={"is": "new"})
        new = digest(engine)
        for name, is_whole in names.items():
            path = Path(folder, "new", name)
            content = path.read_bytes()
            for damage, left, part in damages(content, name):
                if not (is_whole or damage in FEW_DAMAGES):
                    continue
                where = f"{name} {damage}"
                dist.barrier()
                if rank == 0 and left is None:
                    path.unlink()
                elif rank == 0:
                    path.write_bytes(left)
                dist.barrier()
                before = digest(engine)
                message = refusal(lambda: engine.load_checkpoint(folder, tag="new"), errors.CheckpointError)
                # If the manifest and its checksum differ, the message names the manifest.
                expected = "manifest" if name.startswith("manifest") else str(path)
                check(expected in message and part in message, f"{expected!r} or {part!r} is not in {message!r}")
                if name.endswith(".safetensors") and damage.startswith(("flipped", "zeros")):
                    check("refuses to train" in message, f"it is half loaded, and the message says {message!r}")
                    for use in (lambda: train(engine, 1), engine.step, lambda: engine.save_checkpoint(folder, "half")):
                        text = refusal(use, errors.StateError)
                        check("could not be read to its end" in text, f"a half-loaded engine goes on: {text}")
                else:
                    check("refuses" not in message, f"nothing was overwritten, and the message says {message!r}")
                    check(digest(engine) == before, "the engine has been changed")
                    train(engine, 1)
                with LogLines(logging.ERROR) as log:
                    loaded, client_state = engine.load_checkpoint(folder)
                check(loaded == os.path.join(folder, "old") and client_state == {"is": "old"}, f"{loaded} was loaded")
                check(digest(engine) == old, "what was loaded is not what was saved")
                log = [text for text in log.lines if f"loaded {loaded}, because" in text]
                check(len(log) == 1 and expected in log[0] and part in log[0], f"the log says {log}")
                train(engine, 1)
                check(digest(engine) == new, "training does not go on as it did")
                if rank == 0:
                    code, told = verified(os.path.join(folder, "new"))
                    check(code == 1 and expected in told and part in told, f"verify returns {code} and says {told!r}")
                dist.barrier()
                if rank == 0:
                    path.write_bytes(content)
                dist.barrier()
        where = "undamaged"
        check(engine.load_checkpoint(folder)[1] == {"is": "new"} and digest(engine) == new, "it is not loaded again")
        check(rank != 0 or verified(os.path.join(folder, "new"))[0] == 0, "verify finds something")
    return problems


def verified(path: str) -> tuple[int, str]:
    """The exit code and the output of the command that verifies a checkpoint."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = cli.main(["verify", path])
    return code, out.getvalue()


@pytest.mark.parametrize(
    ("stage", "dtype", "names"), [(1, "fp32", FILES), (3, "bf16", {"rank_00001.safetensors": True})]
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_loaded(tmp_path, stage, dtype, names):
    for problems in run_ranks(WORLD, damaged_files, str(tmp_path / "ckpt"), stage, dtype, names):
        assert problems == []


def failing_reads(rank: int, world: int, folder: str) -> list[str]:
    problems = []
    with make(2, "bf16") as engine:
        train(engine, 1)
        engine.save_checkpoint(folder, tag="good")
        good = digest(engine)
        train(engine, 1)
        n_calls = 0

        def read_blocks(path: str, *args: Any) -> Any:
            nonlocal n_calls
            n_calls += 1
            if n_calls > 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return before(path, *args)

        before = _C.read_blocks
        # The disk of rank 1 fails after its first read. The other rank reads everything.
        with replaced(_C, "read_blocks", read_blocks) if rank == 1 else contextlib.nullcontext():
            message = refusal(lambda: engine.load_checkpoint(folder), errors.CheckpointError)
        for part in (os.strerror(errno.EIO), "rank_0000", "refuses to train"):
            if part not in message:
                problems.append(f"{part!r} is not in {message!r}")
        for use in (lambda: train(engine, 1), engine.step, lambda: engine.save_checkpoint(folder, tag="half")):
            text = refusal(use, errors.StateError)
            if "engine.load_checkpoint()" not in text:
                problems.append(f"a half-loaded engine goes on: {text}")
        # The engine stays unusable after a load that finds nothing, and after a load of weights alone.
        engine.load_checkpoint(os.path.join(folder, "nothing"))
        engine.load_checkpoint(folder, load_module_only=True)
        text = refusal(lambda: train(engine, 1), errors.StateError)
        if "engine.load_checkpoint()" not in text:
            problems.append(f"an engine with half of the moments goes on: {text}")
        engine.load_checkpoint(folder)
        if digest(engine) != good:
            problems.append("what was loaded is not what was saved")
        train(engine, 1)
    return problems


def test_an_engine_that_was_half_loaded_does_not_train_until_a_load_has_succeeded(tmp_path):
    for problems in run_ranks(WORLD, failing_reads, str(tmp_path / "ckpt")):
        assert problems == []
