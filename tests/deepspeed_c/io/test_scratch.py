"""io/scratch.py: the file has the right size and no name. The errors for unusable folders have numbers."""

from __future__ import annotations

import errno
import os

import pytest

from deepspeed_c.errors import AioError
from deepspeed_c.io.scratch import scratch
from tests.open_files import open_files


@pytest.fixture(params=["unnamed", "unlinked"])
def kind(request, monkeypatch):
    """The kind of file system. Where it has no unnamed files, the scratch file is unlinked at once."""
    if request.param == "unlinked":
        real = os.open

        def refuse(path, flags, *rest, **options):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, *rest, **options)

        monkeypatch.setattr(os, "open", refuse)
    return request.param


def test_it_has_its_size_and_no_name(kind, tmp_path):
    with scratch(str(tmp_path), 12345) as file:
        assert os.listdir(tmp_path) == []
        assert os.stat(file.path).st_size == file.n_bytes == 12345
        assert os.stat(file.path).st_dev == os.stat(tmp_path).st_dev
        with open(file.path, "r+b") as opened:
            opened.write(b"abc")
        with open(file.path, "rb") as opened:
            assert opened.read(4) == b"abc\0"
    assert not os.path.exists(file.path)
    assert os.listdir(tmp_path) == []


def test_no_descriptor_is_left_after_an_error(kind, tmp_path):
    before = open_files()
    with pytest.raises(KeyboardInterrupt), scratch(str(tmp_path), 1):
        raise KeyboardInterrupt
    with pytest.raises(AioError), scratch(str(tmp_path), 1 << 60):
        pass
    assert open_files() == before
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_said_with_the_numbers(tmp_path):
    n_bytes = 1 << 60
    with (
        pytest.raises(
            AioError, match=rf"{n_bytes} bytes \(1073741824\.00 GiB\) cannot be reserved, \d+ \(.*\) are free"
        ) as caught,
        scratch(str(tmp_path), n_bytes),
    ):
        pass
    assert (caught.value.errno, caught.value.n_bytes, caught.value.filename) == (errno.ENOSPC, n_bytes, str(tmp_path))


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    for name, number in (("missing", errno.ENOENT), ("file", errno.ENOTDIR)):
        with pytest.raises(AioError, match="no file can be made there") as caught, scratch(str(tmp_path / name), 1):
            pass
        assert caught.value.errno == number
    with pytest.raises(AioError, match="no file can be made there"), scratch("/proc", 1):
        pass
    if os.geteuid() != 0:  # root may write to every folder
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(AioError, match="Permission denied"), scratch(str(tmp_path / "closed"), 1):
            pass
