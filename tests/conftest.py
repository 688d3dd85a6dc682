"""The fixture `run_ranks`, which runs a function on several ranks (see ranks.py), and the summary of skipped tests at
the end of a run.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The repository root, so that `tests.ranks` is importable under every import mode of pytest and in the ranks.
_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from tests import costs, defects, item_limits, meter, ranks, skips

# A shell that starts the tests in the background may ignore SIGINT, and children inherit this. Tests that send SIGINT
# would then wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_CACHE = "XDG_CACHE_HOME"


def pytest_configure(config: pytest.Config) -> None:
    """Gives all test processes of a session one new cache of compiled graphs. A shared one may hold the half of a
    library whose compiler was killed with an earlier session."""
    item_limits.register(config)
    defects.register(config)
    if _INDUCTOR not in os.environ:
        _make_folder(config, _INDUCTOR, "dsc_inductor_")
    _make_folder(config, _CACHE, "dsc_cache_")
    meter.register(config)


def _make_folder(config: pytest.Config, name: str, prefix: str) -> None:
    """A new folder for the session, whose path the environment variable ``name`` has until the session ends."""
    before, os.environ[name] = os.environ.get(name), tempfile.mkdtemp(prefix=prefix)
    folder = os.environ[name]
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.add_cleanup(lambda: os.environ.pop(name) if before is None else os.environ.update({name: before}))


def pytest_addoption(parser: pytest.Parser) -> None:
    item_limits.add_options(parser)
    parser.addoption(
        "--full", action="store_true", help="run all tests, also those that cost much (cells.py, costs.py)"
    )
    parser.addoption("--costs", metavar="FILE", help="measure what tests cost, and write the table FILE (costs.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out, without ``--full``, tests that are marked ``full`` (cells.py) and cells that cost much (costs.py)."""
    if config.getoption("--full") or any("::" in arg for arg in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    items[:] = [item for item in items if not item.get_closest_marker("full")]
    if left_out := left_out + costs.leave_out(items, meter.touched_files(config)):
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """``run_ranks(world, fn, *args)``: see ``tests.ranks.run_ranks``."""
    yield ranks.run_ranks
    ranks.stop_ranks()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The path of ``tmp_path`` as a string."""
    return str(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """As many test processes as cores run at once, so torch's threads would compete with one another."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def torch_multiplies() -> None:
    """``"cpu_products": "auto"`` finds times with which torch multiplies, so that a test has the same bits on every
    machine. Tests of this key have other times."""
    import torch

    from deepspeed_c.ops.product_times import ProductTimes, keep_times

    for dtype in (torch.bfloat16, torch.float16):
        keep_times(dtype, ProductTimes(1e-3, 1e-3))


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Fails the test that leaves a process group behind. Otherwise a later test in the same process would fail."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("this test left a process group: have ranks run it (run_ranks), or destroy it")


@pytest.fixture
def process_group_of_the_engine() -> Iterator[None]:
    """Ends the process group that an engine of one process has started."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_collection_finish() -> None:
    """Freeze the objects present now (torch, the tests): they live as long as the session, and scanning them costs each
    garbage collection 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends the ranks with the session, also when a test imported ``run_ranks`` instead of using the fixture.

    Fails the session if a skip has no known way to run the test, or hides a test that continuous integration must run.
    """
    ranks.stop_ranks()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and _summary(reporter)[1] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists skipped tests by requirement, with the way to run them.

    With several test processes, the parent process prints them.
    """
    lines, _ = _summary(terminalreporter)
    if lines:
        terminalreporter.section("skipped tests, and how to run them")
        for line in lines:
            terminalreporter.line(line)


def _summary(reporter: pytest.TerminalReporter) -> tuple[list[str], list[str]]:
    reasons = [report.longrepr[2] for report in reporter.stats.get("skipped", ())]
    return skips.summary(reasons, ci=bool(os.environ.get("CI")))
