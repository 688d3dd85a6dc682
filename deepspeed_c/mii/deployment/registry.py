"""The deployments of a user by name: one folder each, in a folder that nobody else may enter.

The folder of a deployment holds its description, its socket and its logs. An advisory lock (flock) on the folder itself
belongs to the deployment's process and ends with it, however it ends; so a folder without a lock is stale. systemd's
removal of old files from /tmp leaves out folders with such a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_c.config.nearest import nearest
from deepspeed_c.env import read_env
from deepspeed_c.errors import CommError, ConfigError, StateError
from deepspeed_c.mii.errors import DeploymentNotFoundError

__all__ = [
    "SOCKET", "Deployment", "Reservation", "connect", "find", "listening_socket", "names", "open_private", "read_description",
    "remove", "reserve", "root",
]  # fmt: skip

SOCKET = "socket"
_DESCRIPTION = "deployment.json"
_MODE = 0o700


class Deployment(NamedTuple):
    """A deployment whose process runs."""

    name: str
    folder: Path
    config: dict[str, Any]
    """The configuration as ``reserve`` got it."""


class Reservation(NamedTuple):
    """A new deployment's folder. The name is taken as long as a process has ``fd`` open."""

    folder: Path
    fd: int


def root() -> Path:
    """The folder of all deployments of this user: below MII_CACHE_PATH, or else in the folder for temporary files.

    XDG_RUNTIME_DIR is no place for it: it is removed when the user logs out, and a deployment goes on.
    """
    cache = read_env().mii_cache
    if cache:
        return Path(cache).absolute() / "deployments"
    return Path(tempfile.gettempdir()) / f"deepspeed_c-mii-{os.geteuid()}"


def reserve(name: str, config: dict[str, Any]) -> Reservation:
    """Makes the folder of a new deployment. A folder that is left from a dead process is removed first.

    config: the deployment's configuration, which ``find`` returns; values of JSON.
    Raises StateError if a deployment with this name runs, ConfigError if the folder is not private.
    """
    with _locked() as place:
        folder = place / _key(name)
        if folder.exists():
            if _is_held(folder):
                raise StateError(
                    "a deployment with this name runs already",
                    where=f"deployment_name {name!r}",
                    fix="give another deployment_name, or call mii.client(name).terminate_server() first",
                )
            shutil.rmtree(folder)
        folder.mkdir(mode=_MODE)
        try:
            fd = open_private(folder)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / _DESCRIPTION).write_text(json.dumps({"name": name, "config": config}), encoding="utf-8")
        except BaseException:
            shutil.rmtree(folder)
            raise
        return Reservation(folder, fd)


def find(name: str, other_name: str = "") -> Deployment:
    """The running deployment ``name``, or else ``other_name``. Stale folders are removed on the way.

    Raises DeploymentNotFoundError, which says the nearest name and all names.
    """
    entries = {entry.name: entry for entry in _running()}
    for each in (name, other_name):
        if each in entries:
            return entries[each]
    near = nearest(name, entries)
    fix = f"did you mean {' or '.join(map(repr, near))}?" if near else "start it with mii.serve"
    running = f"running: {', '.join(sorted(map(repr, entries)))}" if entries else "none is running"
    raise DeploymentNotFoundError(f"there is no deployment with this name ({running})", where=repr(name), fix=fix)


def names() -> list[str]:
    """The names of all running deployments, sorted."""
    return sorted(entry.name for entry in _running())


def remove(folder: Path, fd: int | None = None) -> None:
    """Removes a deployment's folder.

    fd: the folder as its process has opened it; the folder stays if it is another one by now. None: the folder goes
    only if its process has ended.
    """
    with _locked():
        try:
            found = os.stat(folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        is_ours = os.path.samestat(found, os.fstat(fd)) if fd is not None else not _is_held(folder)
        if is_ours:
            shutil.rmtree(folder)


def read_description(folder: Path) -> tuple[str, dict[str, Any]]:
    """The name and the configuration that ``reserve`` has written."""
    description = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
    return description["name"], description["config"]


def connect(name: str) -> socket.socket:
    """A connection to the deployment ``name``. Raises CommError if none runs, ConfigError if its folder is not private
    to this user."""
    folder = root() / _key(name)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The folder's check and the connection must be about the same folder.
        with _opened(folder.parent), _opened(folder) as fd:
            connection.connect(_address(fd))
    except (FileNotFoundError, ConnectionError) as error:
        connection.close()
        raise CommError(
            f"it does not run: {os.strerror(error.errno or 0)}",
            where=f"deployment {name!r}",
            fix="start it with mii.serve",
        ) from None
    except BaseException:
        connection.close()
        raise
    return connection


def listening_socket(fd: int) -> socket.socket:
    """The socket of the deployment whose folder ``fd`` is; only this user may connect (mode 0600)."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(_address(fd))
        os.chmod(SOCKET, 0o600, dir_fd=fd)
        listening.listen(socket.SOMAXCONN)
    except BaseException:
        listening.close()
        raise
    return listening


def open_private(folder: Path) -> int:
    """The open folder. Raises ConfigError if it belongs to another user, or if others may enter it."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (NotADirectoryError, PermissionError) as error:
        # ELOOP of a symbolic link becomes ENOTDIR because of O_DIRECTORY.
        raise _not_private(folder, os.strerror(error.errno or 0)) from None
    facts = os.fstat(fd)
    mode = stat.S_IMODE(facts.st_mode)
    if facts.st_uid == os.geteuid() and not mode & 0o077:
        return fd
    os.close(fd)
    owner = "" if facts.st_uid == os.geteuid() else f"belongs to user {facts.st_uid}, not {os.geteuid()}; "
    raise _not_private(folder, f"{owner}its mode is {mode:04o}")


def _not_private(folder: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"the folder of deployments is not private: {problem}",
        where=str(folder),
        fix="remove it, or set MII_CACHE_PATH to a folder of yours; it must be a folder with mode 0700",
    )


def _key(name: str) -> str:
    """A name may have any characters and length; a folder's may not."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _address(fd: int) -> str:
    """A path to the socket that fits into the 108 bytes of an address, however long the folder's is."""
    return f"/proc/self/fd/{fd}/{SOCKET}"


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = open_private(folder)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked() -> Iterator[Path]:
    """No other process of this user makes, removes or looks at folders meanwhile."""
    place = root()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=_MODE, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder of deployments cannot be made: {os.strerror(error.errno or 0)}",
            where=str(place),
            fix="set MII_CACHE_PATH to a folder that you may write",
        ) from None
    with _opened(place) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield place


def _is_held(folder: Path) -> bool:
    """Whether the process of the deployment lives."""
    with _opened(folder) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _running() -> list[Deployment]:
    with _locked() as place:
        entries = []
        for folder in sorted(place.iterdir()):
            if not _is_held(folder):
                shutil.rmtree(folder)
            else:
                name, config = read_description(folder)
                entries.append(Deployment(name, folder, config))
        return entries
