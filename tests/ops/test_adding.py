"""docs/adding: the diffs of these pages apply to this tree, and touch the files that
the pages name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# An optimizer takes one C file, one line, one class, one reference, and the tests.
OPTIMIZER = [
    *("csrc/optim/optimizers.inc", "csrc/optim/rmsprop.c", "ops/reference.py", "ops/rmsprop.py"),
    *("tests/csrc/optim/test_optim.c", "tests/csrc/optim/test_rmsprop.c"),
]
# An activation takes one line, one function with its CUDA twin, one reference, and the tests.
ACTIVATION = [
    *("csrc/include/dsc/activations.inc", "csrc/nn/loops/act.c", "csrc/cuda/nn_math.cuh", "ops/reference.py"),
    *("tests/csrc/nn/test_nn.c", "tests/ops/test_nn.py"),
]
# A format of quantized elements takes one line, one line of its formula, its name and dtype, and the tests.
FORMAT = [
    *("csrc/include/dsc/quant_formats.inc", "ops/quant_reference.py", "ops/quant.py"),
    *("tests/csrc/quant/test_quant.c", "tests/ops/test_quant.py"),
]
# A schedule takes one C file, one line, and its formula in a test.
SCHEDULE = ["csrc/pipe/breadth_first.c", "csrc/pipe/schedules.inc", "tests/csrc/pipe/test_schedules.c"]
# A policy takes one page of data, and a line in the tests.
POLICY = ["deepspeed_c/inject/policies/gpt_neo.py", "tests/deepspeed_c/inject/families.py"]
# A monitor takes one file, one line, and one section.
MONITOR = [
    *(f"deepspeed_c/config/{name}.py" for name in ("features", "monitor", "schema")),
    *(f"deepspeed_c/monitor/{name}.py" for name in ("log_lines", "monitor")),
]
# A transport takes one module and one row.
TRANSPORT = [f"deepspeed_c/comm/transports/{name}.py" for name in ("table", "ucc")]

# A source of weights takes one file and one line.
SOURCE = [f"deepspeed_c/zero/weights/sources/{name}.py" for name in ("__init__", "kept")]


@pytest.mark.parametrize(
    "page, parts",
    [
        *(("optimizer", OPTIMIZER), ("nn-kernel", ACTIVATION), ("schedule", SCHEDULE), ("inject-policy", POLICY)),
        *(("monitor", MONITOR), ("transport", TRANSPORT), ("quant-format", FORMAT), ("weight-source", SOURCE)),
    ],
)
def test_the_diff_fits(page: str, parts: list[str]) -> None:
    diff = (ROOT / "docs" / "adding" / f"{page}.md").read_text().partition("```diff\n")[2].partition("```\n")[0]
    _, *files = re.split(r"^--- (\S+)\n\+\+\+ b/(\S+)\n", diff, flags=re.MULTILINE)
    given = dict(zip(files[1::3], zip(files[::3], files[2::3])))
    assert list(given) == parts
    for name, (before, hunks) in given.items():
        is_new = before == "/dev/null"
        assert (ROOT / name).exists() != is_new, name
        for header, body in re.findall(r"^@@ (.*?) @@.*\n((?:[-+ ].*\n|\n)*)", hunks, re.MULTILINE):
            lines = body.splitlines()
            removed, added = ([line[1:] for line in lines if line[:1] != sign] for sign in "+-")
            sizes = [int(size or 1) for size in re.findall(r"[-+]\d+(?:,(\d+))?", header)]
            assert [len(removed), len(added)] == sizes, f"{name} @@ {header}"
            if not is_new:
                found = ("\n" + (ROOT / name).read_text()).count("\n" + "\n".join(removed) + "\n")
                assert found == 1, f"{name} @@ {header} has {found} places"
