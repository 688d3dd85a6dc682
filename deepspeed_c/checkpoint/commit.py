"""How a folder of files becomes a checkpoint at one instant, and how the last good one is found again.

[Note: commit] A checkpoint is written into a hidden folder beside its final place. When everything in it is on disk it gets its name by one rename (two names
change places by one system call where the tag exists already), and only then does ``latest`` name it. A crash at any instant leaves the old
checkpoint, or the new one, under the name; what a dead process has left in hidden folders is removed by the next save.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator

from deepspeed_c import _C
from deepspeed_c.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from deepspeed_c.errors import CheckpointError
from deepspeed_c.logging import logger

__all__ = [
    "LATEST",
    "apply_retention",
    "check_tag",
    "commit_folder",
    "find_tag",
    "make_temporary",
    "read_latest",
    "remove_stale",
    "remove_tree",
    "replace_durably",
    "sync_folder",
    "tags_by_age",
    "write_durably",
    "write_latest",
]

LATEST = "latest"
# .TAG.NONCE.HOST.PID.KIND: "tmp" is being written, "old" has been replaced, "gone" is being deleted.
_HIDDEN = re.compile(r"^\.(?P<tag>.+)\.(?P<nonce>[0-9a-f]{16})\.(?P<host>[^.]+)\.(?P<pid>\d+)\.(?P<kind>tmp|old|gone)$")
FILE_NAME_LIMIT_BYTES = 255


def check_tag(tag: str) -> str:
    """``tag`` as text, if it can name a folder. Raises CheckpointError."""
    tag = str(tag)
    if tag != os.path.basename(tag) or tag in ("", ".", "..") or tag.startswith(".") or "\0" in tag:
        raise CheckpointError(
            f"{tag!r} cannot name a checkpoint",
            where="save_checkpoint(tag=...)",
            fix="use a plain name without slashes that does not begin with a dot, such as 'step1000'",
        )
    if len(os.fsencode(tag)) > FILE_NAME_LIMIT_BYTES - 100:
        raise CheckpointError(f"the tag has {len(tag)} characters", where=tag[:40] + "...", fix="use a shorter tag")
    return tag


def _hidden_name(tag: str, kind: str) -> str:
    host = re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())[:32] or "host"
    return f".{tag}.{secrets.token_hex(8)}.{host}.{os.getpid()}.{kind}"


def make_temporary(save_dir: str, tag: str) -> str:
    """Makes ``save_dir`` where it is missing, and in it the hidden folder that ``tag`` is written into. Returns its path."""
    os.makedirs(save_dir, exist_ok=True)
    path = os.path.join(save_dir, _hidden_name(tag, "tmp"))
    os.mkdir(path)
    return path


def sync_folder(path: str) -> None:
    """Puts the names in a folder on disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        # Some network file systems cannot do this for a folder and say so by EINVAL.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(folder)


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
    sync_folder(folder)


def commit_folder(temporary: str, save_dir: str, tag: str) -> None:
    """Gives a complete folder its name; what had the name before is deleted afterwards. See [Note: commit]."""
    final = os.path.join(save_dir, tag)
    sync_folder(temporary)
    if not os.path.lexists(final):
        try:
            os.rename(temporary, final)
        except OSError as error:
            # Another run has committed the same tag since.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            sync_folder(save_dir)
            return
    if os.path.isdir(final) and not os.path.islink(final) and _C.exchange_paths(temporary, final):
        sync_folder(save_dir)
        remove_tree(temporary)
        return
    # Without the exchange there is an instant without the name; readers then take the "old" one (see find_tag).
    old = os.path.join(save_dir, _hidden_name(tag, "old"))
    os.rename(final, old)
    os.rename(temporary, final)
    sync_folder(save_dir)
    remove_tree(old)


def remove_tree(path: str) -> None:
    """Deletes a folder, or a file; what cannot be deleted is told and left."""
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
    """Makes ``tag`` the one that is loaded when none is named."""
    replace_durably(os.path.join(save_dir, LATEST), tag.encode())


def read_latest(save_dir: str) -> str | None:
    """The tag that ``latest`` names; None where there is no such file, or nothing in it."""
    try:
        with open(os.path.join(save_dir, LATEST), encoding="utf-8") as file:
            return file.read(4096).strip() or None
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None


def find_tag(save_dir: str, tag: str) -> str:
    """The folder of ``tag``: its name, or the one that a crash in the middle of a replacement has left (see ``commit_folder``)."""
    final = os.path.join(save_dir, tag)
    if not os.path.isdir(final):
        for name, hidden in _hidden(save_dir):
            if hidden["tag"] == tag and hidden["kind"] == "old":
                return os.path.join(save_dir, name)
    return final


def tags_by_age(save_dir: str) -> list[tuple[str, Manifest]]:
    """The tags of complete checkpoints of ours under ``save_dir``, the furthest trained first."""
    found: list[tuple[int, float, str, Manifest]] = []
    try:
        with os.scandir(save_dir) as entries:
            names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return []
    for name in names:
        path = os.path.join(save_dir, name)
        try:
            modified = os.stat(os.path.join(path, MANIFEST)).st_mtime
            manifest = read_manifest(path)
        except (OSError, CheckpointError):
            continue
        found.append((manifest.counters.get("global_steps", 0), modified, name, manifest))
    found.sort(key=lambda item: item[:3], reverse=True)
    return [(name, manifest) for _, _, name, manifest in found]


def apply_retention(save_dir: str, newest: str, keep_last: int | None, keep_every: int | None) -> list[str]:
    """Deletes checkpoints of ours beyond the newest ``keep_last``, except those whose step is a multiple of ``keep_every``. Returns their tags.

    ``newest`` and what ``latest`` names always stay, and so does everything that is no complete checkpoint of ours.
    """
    if keep_last is None:
        return []
    kept = {newest, read_latest(save_dir)}
    tags = [(tag, manifest) for tag, manifest in tags_by_age(save_dir) if tag != newest]
    removed = []
    for tag, manifest in tags[max(keep_last - 1, 0) :]:
        if tag in kept or (keep_every and manifest.counters.get("global_steps", 0) % keep_every == 0):
            continue
        # First it loses its name: a crash leaves no half checkpoint under it.
        gone = os.path.join(save_dir, _hidden_name(tag, "gone"))
        try:
            os.rename(os.path.join(save_dir, tag), gone)
        except OSError as error:
            logger.warning("%s: cannot be deleted: %s", os.path.join(save_dir, tag), error.strerror)
            continue
        remove_tree(gone)
        removed.append(tag)
    return removed


def remove_stale(save_dir: str) -> None:
    """Deletes what processes of this host that have ended left in hidden folders; an "old" one only when its tag is there again."""
    host = re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())[:32] or "host"
    for name, hidden in _hidden(save_dir):
        if hidden["host"] != host or _is_alive(int(hidden["pid"])):
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


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
