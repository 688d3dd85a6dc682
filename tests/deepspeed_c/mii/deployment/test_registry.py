"""The folder of deployments: access by others, taken names, and folders of dead processes."""

from __future__ import annotations

import contextlib
import os
import stat
import threading

import pytest

from deepspeed_c.errors import CommError, ConfigError, StateError
from deepspeed_c.mii.deployment import registry
from deepspeed_c.mii.errors import DeploymentNotFoundError
from tests import waits

NAMES = ["a", "opt-mii-deployment", "facebook/opt-mii-deployment", "..", "x" * 200, "\N{GRINNING FACE}"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    # Longer than the 108 bytes of a socket's address.
    folder = tmp_path / ("deep" * 30)
    monkeypatch.setenv("MII_CACHE_PATH", str(folder))
    return folder


def test_names_of_all_kinds_are_found_with_their_configurations(cache):
    held = [registry.reserve(name, {"number": i}) for i, name in enumerate(NAMES)]
    assert registry.names() == sorted(NAMES)
    for i, name in enumerate(NAMES):
        found = registry.find(name)
        assert (found.name, found.config, found.folder) == (name, {"number": i}, held[i].folder)
    assert {path.parent for path in (place.folder for place in held)} == {cache / "deployments"}
    for place in held:
        os.close(place.fd)
    assert registry.names() == []
    assert list((cache / "deployments").iterdir()) == []


def test_everything_is_private():
    place = registry.reserve("a", {})
    listening = registry.listening_socket(place.fd)
    with listening:
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (place.folder.parent, place.folder)}
        assert set(modes.values()) == {0o700}, modes
        assert stat.S_IMODE((place.folder / registry.SOCKET).stat().st_mode) == 0o600
        with registry.connect("a"):
            pass
    os.close(place.fd)


def test_a_name_is_taken_once_and_free_after_its_end():
    first = registry.reserve("a", {})
    with pytest.raises(StateError, match="'a'.*runs already"):
        registry.reserve("a", {})
    os.close(first.fd)
    (first.folder / "old.log").write_text("left by the dead")
    second = registry.reserve("a", {})
    assert second.folder == first.folder and not (second.folder / "old.log").exists()
    registry.remove(second.folder)
    assert second.folder.exists()  # it is held
    registry.remove(second.folder, second.fd)
    assert not second.folder.exists()
    third = registry.reserve("a", {})
    registry.remove(third.folder, second.fd)
    assert third.folder.exists()  # another folder by now
    for place in (second, third):
        os.close(place.fd)
    registry.remove(third.folder)
    registry.remove(third.folder)
    assert not third.folder.exists()


def test_an_unknown_name_says_the_nearest():
    with pytest.raises(DeploymentNotFoundError, match="none is running"):
        registry.find("opt-mii-deploymnet")
    held = [registry.reserve(name, {}) for name in ("opt-mii-deployment", "other")]
    with pytest.raises(DeploymentNotFoundError, match="did you mean 'opt-mii-deployment'"):
        registry.find("opt-mii-deploymnet")
    with pytest.raises(DeploymentNotFoundError, match="running: 'opt-mii-deployment', 'other'"):
        registry.find("nothing like it at all")
    assert registry.find("opt", "opt-mii-deployment").name == "opt-mii-deployment"
    for place in held:
        os.close(place.fd)


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_may_enter_is_refused(cache, mode):
    cache.mkdir()
    (cache / "deployments").mkdir()
    (cache / "deployments").chmod(mode)
    for call in (lambda: registry.reserve("a", {}), lambda: registry.find("a"), lambda: registry.connect("a")):
        with pytest.raises(ConfigError, match=f"not private: its mode is {mode:04o}"):
            call()


def test_a_folder_of_another_user_is_refused(cache, monkeypatch):
    cache.mkdir()
    (cache / "deployments").mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)  # only root could give the folder away
    for call in (lambda: registry.reserve("a", {}), lambda: registry.find("a"), lambda: registry.connect("a")):
        with pytest.raises(ConfigError, match=f"not private: belongs to user {owner}, not {owner + 1}"):
            call()


def test_a_link_and_a_file_are_refused(cache, tmp_path):
    cache.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (cache / "deployments").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="not private"):
        registry.reserve("a", {})
    (cache / "deployments").unlink()
    (cache / "deployments").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        registry.reserve("a", {})


def test_a_deployment_that_does_not_run_cannot_be_connected_to():
    with pytest.raises(CommError, match="'a'.*does not run: No such file"):
        registry.connect("a")
    place = registry.reserve("a", {})
    registry.listening_socket(place.fd).close()
    with pytest.raises(CommError, match="'a'.*does not run: Connection refused"):
        registry.connect("a")
    os.close(place.fd)


def test_of_many_that_want_a_name_at_once_one_gets_it():
    """Each call opens and locks the folders for itself, so threads stand for processes."""
    names = [f"deployment {i}" for i in range(20)]
    begin, held = threading.Barrier(4), []

    def run() -> None:
        begin.wait(waits.LIMIT_SECONDS)
        for name in names:
            with contextlib.suppress(StateError):
                held.append((name, registry.reserve(name, {})))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        waits.joined(thread)
    assert sorted(name for name, _ in held) == sorted(names)
    for _, place in held:
        os.close(place.fd)
