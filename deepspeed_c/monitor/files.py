"""Files that monitors append to, one line for each record. The files stay valid after a kill and a restart."""

from __future__ import annotations

import os
from pathlib import Path

from deepspeed_c.errors import ConfigError

__all__ = ["append", "mend_last_line", "open_folder"]

_BLOCK = 1 << 16


def open_folder(section: object, key: str) -> Path:
    """Make and return the folder ``output_path/job_name`` of a section.

    Raises ConfigError if the folder cannot be made, or no file can be made in it.
    """
    folder = Path(section.output_path) / section.job_name
    probe = folder / f".deepspeed_c-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permission bits are not enough: root ignores them, and they do not show a read-only mount.
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{folder.absolute()} cannot be written: {error.strerror or error}",
            where=f"{key}.output_path",
            fix="name a folder that rank 0 may write, or free space there",
        ) from error
    return folder


def append(path: Path, text: str) -> None:
    """Append ``text`` in one piece, so that a kill tears the last line at most."""
    data = text.encode()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


def mend_last_line(path: Path) -> bool:
    """Remove an incomplete last line, which a kill left behind. Return whether the file has any lines."""
    if not path.exists():
        return False
    with open(path, "r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            place = file.read(end - start).rfind(b"\n")
            if place >= 0:
                end = start + place + 1
                break
            end = start
        if end < size:
            file.truncate(end)
        return end > 0
