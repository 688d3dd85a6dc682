"""Turns a folder of files into a checkpoint at one instant, and finds the last good checkpoint again.

[Note: commit] A checkpoint is written into a hidden folder beside its final place. When everything in it is on disk,
one rename gives it its name. Where the tag exists already, one system call swaps the two names. Only then does
``latest`` name it. A crash at any instant leaves the old checkpoint, or the new one, under the name. The next save
removes hidden folders that a dead process has left.

[Note: retention] Several runs may save into one folder, and nothing tells whose a tag is. So a save deletes a tag only
if every tag that it keeps has more steps and was written later. It neither counts nor deletes incomplete tags, the tag
that ``latest`` names, tags that another run has written since, and tags with more steps. (These belong to another run,
or to this run before it loaded an older tag.) The writer of a tag holds a shared lock on the folder from the rename of
the tag until ``latest`` names it. Retention reads and renames under an exclusive lock. If it does not get the lock, it
leaves the work to the next save. On a file system without locks, only the order of times protects a tag.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

from deepspeed_c import _C
from deepspeed_c.checkpoint.native.held import read_held
from deepspeed_c.checkpoint.native.manifest import MANIFEST, Manifest, read_manifest
from deepspeed_c.errors import CheckpointError
from deepspeed_c.logging import logger

__all__ = [
    "LATEST",
    "apply_retention",
    "check_tag",
    "commit_folder",
    "find_tag",
    "keep_from_retention",
    "make_temporary",
    "read_latest",
    "read_tags",
    "remove_stale",
    "remove_tree",
    "replace_durably",
    "sync_path",
    "write_durably",
    "write_latest",
]

LATEST = "latest"
# .TAG.NONCE.HOST.PID-START.KIND: "tmp" is being written, "old" has been replaced, "gone" is being deleted.
_HIDDEN = re.compile(
    r"^\.(?P<tag>.+)\.(?P<nonce>[0-9a-f]{16})\.(?P<host>[^.]+)\.(?P<pid>\d+)-(?P<start>\d+)\.(?P<kind>tmp|old|gone)$"
)
FILE_NAME_LIMIT_BYTES = 255
# Files beside the tags; a tag cannot have their names.
_TAKEN = frozenset({"latest", "latest_universal", "zero_to_fp32.py"})
# How often a commit tries again when other processes rename the same tag between its steps.
COMMIT_ATTEMPTS = 100
# How long a commit waits for another run's retention, which only reads manifests and renames.
LOCK_SECONDS = 10.0


def check_tag(tag: str) -> str:
    """``tag`` as text, if it can name a folder. Raises CheckpointError."""
    tag = str(tag)
    # Not printable: control characters, which a damaged `latest` may hold too, and lone surrogates, which are no text.
    if tag in ("", *_TAKEN) or "/" in tag or tag.startswith(".") or tag != tag.strip() or not tag.isprintable():
        raise CheckpointError(
            f"{tag!r} cannot name a checkpoint",
            where="save_checkpoint(tag=...)",
            fix="use a plain name without slashes that does not begin with a dot, such as 'step1000'",
        )
    if len(os.fsencode(tag)) > FILE_NAME_LIMIT_BYTES - 100:
        raise CheckpointError(f"the tag has {len(tag)} characters", where=tag[:40] + "...", fix="use a shorter tag")
    return tag


def _hidden_name(tag: str, kind: str) -> str:
    return f".{tag}.{secrets.token_hex(8)}.{_host()}.{os.getpid()}-{_start_of(os.getpid())}.{kind}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())[:32] or "host"


def _start_of(pid: int) -> int:
    """When a process began, in the kernel's ticks; 0 where that is not told.

    A container that is started again gives its processes the ids of before.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may contain anything; the start time is field 22, the 20th after the name.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def make_temporary(save_dir: str, tag: str) -> str:
    """Makes ``save_dir`` where it is missing, and in it the hidden folder that ``tag`` is written into.

    Returns its path.
    """
    _make_folders(os.path.abspath(save_dir))
    path = os.path.join(save_dir, _hidden_name(tag, "tmp"))
    os.mkdir(path)
    return path


def _make_folders(path: str) -> None:
    """As ``os.makedirs``, but also syncs each new name to disk."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make_folders(parent)
    with contextlib.suppress(FileExistsError):  # another rank or run was faster
        os.mkdir(path)
    sync_path(parent)


def sync_path(path: str) -> None:
    """Syncs a file, or the names in a folder, to disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        # Some network file systems cannot do this for a folder and say so by EINVAL.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(file)


def write_durably(path: str, content: bytes, mode: int = 0o666) -> None:
    """Writes a new file and waits until its content is on disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)
    finally:
        os.close(file)


def replace_durably(path: str, content: bytes, mode: int = 0o666) -> None:
    """Gives a file new content: at any instant it has the old or the new."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, _hidden_name(name, "tmp"))
    try:
        write_durably(temporary, content, mode)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_path(folder)


def commit_folder(temporary: str, save_dir: str, tag: str) -> None:
    """Gives a complete folder its name; a folder that had the name before is deleted afterwards. See [Note: commit]."""
    final = os.path.join(save_dir, tag)
    sync_path(temporary)
    for attempt in range(COMMIT_ATTEMPTS):
        try:
            replaced = _take_name(temporary, final, tag)
            break
        except OSError as error:
            # Between two of these steps another run has given the name to its own folder, or has deleted the old
            # folder.
            is_race = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT) and os.path.isdir(temporary)
            if not is_race or attempt == COMMIT_ATTEMPTS - 1:
                raise
    sync_path(save_dir)
    if replaced is not None:
        _discard(replaced, save_dir, tag)


def _take_name(temporary: str, final: str, tag: str) -> str | None:
    """Renames. Returns the new path of the folder that had the name, None if there was none."""
    if not os.path.lexists(final):
        os.rename(temporary, final)
        return None
    if os.path.isdir(final) and not os.path.islink(final) and _C.exchange_paths(temporary, final):
        return temporary
    # Without the exchange there is an instant at which no folder has the name; readers then take the "old" folder (see
    # find_tag).
    old = os.path.join(os.path.dirname(final), _hidden_name(tag, "old"))
    os.rename(final, old)
    try:
        os.rename(temporary, final)
    except OSError:
        if os.path.lexists(final):  # another run has taken the name, so the old folder has been replaced all the same
            _discard(old, os.path.dirname(final), tag)
        else:
            with contextlib.suppress(OSError):
                os.rename(old, final)
        raise
    return old


def _discard(path: str, save_dir: str, tag: str) -> None:
    """Deletes a replaced checkpoint."""
    gone = _set_aside(path, save_dir, tag)
    if gone is not None:
        remove_tree(gone)


def _set_aside(path: str, save_dir: str, tag: str) -> str | None:
    """Gives a folder a hidden name before its deletion and returns the new path, so that nobody takes it for a
    checkpoint if the deletion is interrupted. None if the renaming fails.
    """
    gone = os.path.join(save_dir, _hidden_name(tag, "gone"))
    try:
        os.rename(path, gone)
    except OSError as error:
        logger.warning("%s: cannot be deleted: %s", path, error.strerror)
        return None
    return gone


def remove_tree(path: str) -> None:
    """Deletes a folder or a file; if it cannot be deleted, logs a warning and leaves the rest."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s: cannot be deleted: %s", path, error.strerror)


def write_latest(save_dir: str, tag: str) -> None:
    """Makes ``tag`` the default for loading."""
    replace_durably(os.path.join(save_dir, LATEST), tag.encode())


def read_latest(save_dir: str) -> str | None:
    """The tag that ``latest`` names; None where there is no such file, or no text in it (files that a machine lost its
    power over are full of zeros).
    """
    try:
        with open(os.path.join(save_dir, LATEST), encoding="utf-8") as file:
            tag = file.read(4096).strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("%s: cannot be read: %s", os.path.join(save_dir, LATEST), error)
        return None
    if not tag.isprintable():
        logger.warning("%s: holds no tag but %r", os.path.join(save_dir, LATEST), tag[:40])
        return None
    return tag or None


def find_tag(save_dir: str, tag: str) -> str:
    """The folder of ``tag``: its name, or the "old" folder that is left when a replacement crashes midway (see
    ``commit_folder``).
    """
    final = os.path.join(save_dir, tag)
    if not os.path.isdir(final):
        for name, hidden in _hidden(save_dir):
            if hidden["tag"] == tag and hidden["kind"] == "old":
                return os.path.join(save_dir, name)
    return final


def read_tags(save_dir: str) -> tuple[list[tuple[str, Manifest]], list[str]]:
    """(the tags of complete checkpoints of ours under ``save_dir``, the furthest trained first; the problems of those
    whose manifest is damaged, with their paths)."""
    found: list[tuple[int, float, str, Manifest]] = []
    problems = []
    for name in sorted(_tag_names(save_dir)):
        path = os.path.join(save_dir, name)
        try:
            modified, manifest = _read_complete(path)
        except (OSError, CheckpointError) as error:
            # Without a manifest it is no checkpoint of ours, or another run has just deleted it.
            if os.path.exists(os.path.join(path, MANIFEST)):
                problem = str(error).splitlines()[0]
                problems.append(problem if path in problem else f"{path}: {problem}")
            continue
        found.append((manifest.counters.get("global_steps", 0), modified, name, manifest))
    found.sort(key=lambda item: item[:3], reverse=True)
    return [(name, manifest) for _, _, name, manifest in found], problems


def _read_complete(path: str) -> tuple[float, Manifest]:
    """(when it was written, manifest) of one save of ours. Raises OSError and CheckpointError."""
    return read_held(path, lambda folder: (os.stat(MANIFEST, dir_fd=folder).st_mtime, read_manifest(path, folder)))


def _tag_names(save_dir: str) -> list[str]:
    try:
        with os.scandir(save_dir) as entries:
            return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return []


class _Tag(NamedTuple):
    """A complete checkpoint: how far it was trained, and when it was written."""

    name: str
    step: int
    written: float


def apply_retention(
    save_dir: str, newest: str, keep_last: int | None, keep_every: int | None, *, counts_deepspeed: bool = False
) -> list[str]:
    """Deletes checkpoints beyond the last ``keep_last`` up to ``newest``, which has just been saved, except at steps
    that are a multiple of ``keep_every``.

    Considers ours, and with ``counts_deepspeed`` those in DeepSpeed's layout. Returns their tags. See [Note:
    retention].
    """
    if keep_last is None:
        return []
    with _locked(save_dir, fcntl.LOCK_EX, 0.0) as is_alone:
        if not is_alone:  # another run is just giving a tag its name
            return []
        gone = _set_aside_old(save_dir, newest, keep_last, keep_every, counts_deepspeed)
    for path in gone.values():
        remove_tree(path)
    return list(gone)


def _set_aside_old(
    save_dir: str, newest: str, keep_last: int, keep_every: int | None, counts_deepspeed: bool
) -> dict[str, str]:
    """Renames the checkpoints that are not kept. Returns tag -> new path."""
    tags = {tag.name: tag for tag in _complete_tags(save_dir, counts_deepspeed)}
    mine = tags.pop(newest, None)
    if mine is None:  # another run has replaced it by something else, or deleted it
        return {}
    older = sorted((tag for tag in tags.values() if tag.step <= mine.step), key=lambda tag: tag[1:], reverse=True)
    kept, rest = [mine, *older[: keep_last - 1]], older[keep_last - 1 :]
    first_written = min(tag.written for tag in kept)
    latest = read_latest(save_dir)
    gone = {}
    for tag in rest:
        is_kept = tag.name == latest or tag.written > first_written or (keep_every and tag.step % keep_every == 0)
        path = None if is_kept else _set_aside(os.path.join(save_dir, tag.name), save_dir, tag.name)
        if path is not None:
            gone[tag.name] = path
    return gone


def _complete_tags(save_dir: str, counts_deepspeed: bool) -> Iterator[_Tag]:
    for name in _tag_names(save_dir):
        path = os.path.join(save_dir, name)
        try:
            if os.path.exists(os.path.join(path, MANIFEST)):
                written, manifest = _read_complete(path)
                yield _Tag(name, manifest.counters.get("global_steps", 0), written)
            elif counts_deepspeed:
                step = _step_of_deepspeed(path)
                if step is not None:
                    with os.scandir(path) as files:
                        yield _Tag(name, step, max(file.stat().st_mtime for file in files))
        except (OSError, CheckpointError):
            continue


def _step_of_deepspeed(path: str) -> int | None:
    """The step of a complete checkpoint in DeepSpeed's layout, whose tensors are not read; None for anything else."""
    from deepspeed_c.checkpoint.formats.deepspeed.model_file import ModelStates, find_files

    files = find_files(path)
    if files is None or 0 not in files.models:
        return None
    model = ModelStates(files.models[0], layers=files.layers)
    n_ranks = model.world_size if isinstance(model.world_size, int) else 1
    for by_rank in (files.optimizers, files.models if files.is_stage3 else {}):
        if by_rank and set(by_rank) != set(range(n_ranks)):
            return None
    if model.missing_experts(files.experts):
        return None
    step = model.content.get("global_steps")
    return step if isinstance(step, int) else None


@contextlib.contextmanager
def keep_from_retention(save_dir: str) -> Iterator[None]:
    """While a tag has its name and ``latest`` does not name it yet: nobody's retention takes place.

    See [Note: retention].
    """
    with _locked(save_dir, fcntl.LOCK_SH, LOCK_SECONDS) as is_locked:
        if not is_locked:
            logger.warning("%s: another process has held its lock for %g s; going on without", save_dir, LOCK_SECONDS)
        yield


@contextlib.contextmanager
def _locked(save_dir: str, kind: int, seconds: float) -> Iterator[bool]:
    """Holds the folder's lock, which ends with the process at the latest.

    False where somebody else holds it all the time; True where there are no locks.
    """
    try:
        folder = os.open(save_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # the writer will report the error
        yield True
        return
    try:
        yield _try_lock(folder, kind, time.monotonic() + seconds)
    finally:
        os.close(folder)


def _try_lock(folder: int, kind: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(folder, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        except OSError:  # network file systems: no locks, or none on folders
            return True


def remove_stale(save_dir: str) -> None:
    """Deletes hidden folders of this host's dead processes. An "old" folder gets its tag back instead if no folder has
    it.
    """
    for name, hidden in _hidden(save_dir):
        if hidden["host"] != _host() or _is_alive(int(hidden["pid"]), int(hidden["start"])):
            continue
        if hidden["kind"] == "old" and not os.path.isdir(os.path.join(save_dir, hidden["tag"])):
            with contextlib.suppress(OSError):
                os.rename(os.path.join(save_dir, name), os.path.join(save_dir, hidden["tag"]))
            continue
        remove_tree(os.path.join(save_dir, name))


def _hidden(save_dir: str) -> Iterator[tuple[str, dict[str, str]]]:
    try:
        names = sorted(os.listdir(save_dir))
    except OSError:
        return
    for name in names:
        match = _HIDDEN.match(name)
        if match:
            yield name, match.groupdict()


def _is_alive(pid: int, start: int) -> bool:
    """Whether a process with this id exists and began at ``start``."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return start == 0 or _start_of(pid) in (0, start)
