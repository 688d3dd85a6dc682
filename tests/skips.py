"""Requirements of skipped tests, and how to meet them.

The end of a test run lists both. A skip that is not in this table fails the run. So does, with ``CI`` set in the
environment, a skip for want of what every machine of continuous integration has (``Way.ci_has_it``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["WAYS", "Way", "summary", "way_of"]


class Way(NamedTuple):
    """A kind of skip."""

    needs: str
    pattern: str
    """A regular expression that matches the reasons of this kind of skip."""
    how: str
    ci_has_it: bool = False
    """Continuous integration can run the tests, so a skip there hides a fault of its set-up."""


WAYS = (
    Way(
        "a CUDA device",
        r"CUDA device|GB of device memory",
        "make test, on a machine that has one (for some tests two, for one 14 GB of its memory)",
    ),
    Way(
        "DeepSpeed to compare with",
        r"DSC_PEER_PYTHON",
        "DSC_PEER_PYTHON=/path/to/python make test; that Python's environment has torch and `pip install deepspeed==0.19.6`",
    ),
    Way(
        "a memory control group",
        r"no memory control group can be made",
        "as root, or in a group of version 2 whose memory controller is handed on",
    ),
    Way(
        "DeepSpeed beside this package",
        r"could not import 'deepspeed'",
        "`pip install --no-deps deepspeed==0.19.6` into a copy of the environment, and pytest there",
    ),
    Way(
        "compressed-tensors, which reads packed models",
        r"could not import 'compressed_tensors'",
        "`pip install -c constraints.txt compressed-tensors`, and make test",
    ),
    Way(
        "ml_dtypes, which has other implementations of float8",
        r"could not import 'ml_dtypes'",
        "`pip install -c constraints.txt ml_dtypes`, and make test",
    ),
    Way(
        "the program openssl, which makes certificates",
        r"needs the program openssl",
        "apt-get install openssl, and make test",
    ),
    Way(
        "another processor",
        r"processor does not run|processor cannot flush",
        "make test, on one that has the instructions (avx512: x86-64-v4); make -C csrc neon-check for neon, with an emulator",
    ),
    Way(
        "to make network namespaces",
        r"no network namespace can be made",
        "make test, as root, with CAP_SYS_ADMIN (it installs iproute2)",
        ci_has_it=True,
    ),
    Way("an MPI", r"no MPI can be run here", "apt-get install openmpi-bin mpich (make test does so as root)"),
    Way("two processor cores", r"one core cannot be divided", "make test, where the process may use two"),
    Way(
        "addresses that the thread sanitizer can follow",
        r"vm\.mmap_rnd_bits",
        "sysctl vm.mmap_rnd_bits=28 as root, then make test",
    ),
    Way(
        "a compiler and its sanitizers",
        r"no \S+ on PATH|cannot link with -fsanitize",
        "apt-get install build-essential, or name another compiler in CC and CXX",
    ),
    Way(
        "Prometheus",
        r"(prometheus|promtool) is not installed",
        "apt-get install prometheus (make test does so as root)",
    ),
    Way(
        "the backends of monitors",
        r"could not import '(tensorboard|wandb|comet_ml|prometheus_client)",
        'pip install -c constraints.txt "deepspeed_c[monitor]"',
    ),
    Way("optuna", r"the extra \[tuning\] is not installed", 'pip install -c constraints.txt "deepspeed_c[tuning]"'),
    Way(
        "the Hugging Face stack or Lightning",
        r"the extra \[(hf|test)\] is not installed",
        "make test with Python 3.11 or newer (PYTHON=python3.11), which installs both",
    ),
    Way(
        "torchdata",
        r"torchdata is not installed",
        "`pip install --no-deps torchdata` into a copy of the environment, and pytest there",
    ),
    Way("Python 3.13 or older", r"^Python 3\.14", "PYTHON=python3.13 make test"),
    Way("Python 3.11", r"came with Python 3\.11", "PYTHON=python3.11 make test"),
    Way("clang-format", r"clang-format \S+ is not installed", "make test, which installs it"),
    Way("fio", r"fio is not installed", "apt-get install fio, then make test"),
    Way(
        "the right to mount",
        r"mounting a small tmpfs is not permitted|no file system of our own",
        "make test as root, in a container with CAP_SYS_ADMIN",
    ),
    Way(
        "Linux's /proc",
        r"no /proc|read from /proc|peak",
        "make test on Linux with /proc mounted, where a process may reset its own peak (/proc/self/clear_refs)",
    ),
    Way("git's history", r"needs a git checkout", "git clone without --depth, then make test"),
    Way("a folder for temporary files", r"no temporary folder", "make test, with TMPDIR naming one"),
)


def way_of(reason: str) -> Way | None:
    """The kind of skip for a reason."""
    return next((way for way in WAYS if re.search(way.pattern, reason)), None)


def summary(reasons: Iterable[str], ci: bool = False) -> tuple[list[str], list[str]]:
    """(lines to print about the skips with these reasons, reasons that fail the run)

    ci: the run is one of continuous integration.
    """
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    by_way: dict[Way, Counter[str]] = {}
    for reason, n in counts.items():
        way = way_of(reason)
        if way is not None:
            by_way.setdefault(way, Counter())[reason] = n
    lines = []
    for way, found in sorted(by_way.items(), key=lambda item: -item[1].total()):
        lines.append(f"{found.total():5} need {way.needs}: {way.how}")
        lines += [f"      {n:5} {reason}" for reason, n in found.most_common()]
    unknown = sorted(reason for reason in counts if way_of(reason) is None)
    lines += [f"{counts[reason]:5} with no way to run them in tests/skips.py: {reason}" for reason in unknown]
    hidden = sorted(reason for way, found in by_way.items() if ci and way.ci_has_it for reason in found)
    lines += [
        f"{counts[reason]:5} that continuous integration must run, so this run failed: {reason}" for reason in hidden
    ]
    return lines, unknown + hidden
