"""docs/compatibility.tsv describes this package correctly, and docs/compatibility.md is generated from it.

The check finds a false row.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.engine.getters import ABSENT_METHODS
from deepspeed_c.errors import MissingNameError
from scripts.compatibility import COMMAND, ENGINE, PARAMETER, STATES, Row, main, misfits, read_rows, render
from tests import fresh
from tests.deepspeed_c.zero.traits import Mlp
from tests.ranks import on_ranks

ROOT = Path(__file__).resolve().parents[2]

# Runs in a separate process, in which `deepspeed` means this package.
CHECK = """
import json, sys
import deepspeed_c
from scripts import compatibility as c
deepspeed_c.install_as_deepspeed(force=True)
wrong = [c.Row(*row) for row in json.loads(sys.argv[1])]
rows = c.read_rows()
print(json.dumps([c.check(rows), c.render(rows) == c.DOCUMENT.read_text(), c.check(wrong)]))
"""

WRONG = [
    (Row("deepspeed", "initialize", "function", "(args=None, nodes=1)", "same", ""), "has no nodes"),
    (Row("deepspeed", "init_distributed", "function", "", "not yet", ""), "is there"),
    (Row("deepspeed", "get_accelerator", "function", "()", "different", ""), "for no reason"),
    (Row("deepspeed", "init_inference", "function", "(config=None)", "same", ""), "needs model"),
    (
        Row("deepspeed.compression.basic_layer", "Conv2dLayer_Compress", "function", "()", "different", "a reason"),
        "is not built",
    ),
    (Row("deepspeed.comm", "get_rank", "function", "", "raises when called", ""), "is there"),
    (Row("deepspeed.zero", "MiCS_Init", "class", "", "not yet", ""), "is not built"),
    (Row("deepspeed.ops", "no_such_name", "function", "()", "absent", ""), "raises deepspeed.ops.no_such_name"),
    (Row("deepspeed", "add_config_arguments", "function", "", "absent", "a reason"), "is there"),
    (Row("deepspeed.zero", "TiledLinear", "class", "(in_features)", "same", ""), "is not built"),
    (Row("deepspeed.utils", "no_such_name", "function", "()", "not yet", ""), "raises deepspeed.utils.no_such_name"),
    (Row("deepspeed.utils", "logger", "function", "()", "same", ""), "cannot be called"),
    (Row("deepspeed.runtime.lr_schedules", "VALID_LR_SCHEDULES", "constant", "['OneCycle']", "same", ""), "instead of"),
    (Row(ENGINE, "no_such_method", "method", "(self)", "not yet", ""), "has no attribute"),
    (Row(ENGINE, "sparse_allreduce", "method", "(self)", "same", ""), "has no attribute"),
    (Row(ENGINE, "get_lr", "method", "(self)", "nearly", ""), "is of state 'nearly'"),
    (Row(COMMAND, "--num_gpus", "flag", "['2']", "not yet", ""), "is accepted"),
    (Row(COMMAND, "--no_ssh", "flag", "", "same", ""), "raises"),
    (Row("environment", "DS_BUILD_OPS", "variable", "", "same", ""), "is read: False"),
    (Row("deepspeed", "get_accelerator", "function", "()", "same", ""), None),
    (Row("deepspeed", "get_accelerator", "function", "()", "same", ""), "has two rows"),
]


def test_names_that_a_later_deepspeed_lacks_are_listed() -> None:
    removed = [row for row in read_rows() if row.removed]
    assert removed and {row.removed for row in removed} == {"0.19.8"}
    removed_in = {"one": "", "two": "9.1"}
    rows = [Row("deepspeed", name, "function", "()", "same", "", version) for name, version in removed_in.items()]
    assert "Removed upstream in 9.1: `two`." in render(rows).splitlines()
    assert "Removed upstream" not in render(rows[:1]).split("They stay here.")[1]


def test_every_row_is_true_and_the_document_is_made_from_them() -> None:
    done = fresh.run(["-c", CHECK, json.dumps([row for row, _ in WRONG])], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    problems, is_up_to_date, found = json.loads(done.stdout.splitlines()[-1])
    assert problems == [], "\n".join(problems)
    assert is_up_to_date, "run: make docs"
    wanted = [(row, text) for row, text in WRONG if text is not None]
    assert len(found) == len(wanted), found
    for said, (row, text) in zip(found, wanted):
        assert said.startswith(f"{row.where}.{row.name} ") and text in said, (said, text)


def test_the_table_is_whole() -> None:
    rows = read_rows()
    assert {row.state for row in rows} == set(STATES)
    for where in (ENGINE, PARAMETER, COMMAND, "deepspeed.comm.comm", "deepspeed.zero", "deepspeed.ops.adam"):
        assert sum(row.where == where for row in rows) > 3, where
    # Names that are left out on purpose. Each breaks an import of some project.
    assert sum(row.state == "absent" for row in rows) <= 17
    assert len(rows) > 800 and sum(row.state == "same" for row in rows) > len(rows) / 2


# -- queries of a running engine ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_engine_and_parameters_have_what_the_table_says(rank: int, world: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    rows = read_rows()
    with deepspeed_c.zero.Init():
        model = Mlp()
    with deepspeed_c.initialize(model=model, config=config)[0] as engine:
        param = engine.module.inp.weight
        for row in rows:
            if row.where == PARAMETER:
                assert hasattr(param, row.name) == (row.state == "same"), row
            elif row.where == ENGINE and row.kind == "attribute":
                assert hasattr(engine, row.name) == (row.state == "same"), row
        for name, instead in ABSENT_METHODS.items():
            assert not hasattr(engine, name), name
            with pytest.raises(MissingNameError) as raised:
                getattr(engine, name)
            assert instead in str(raised.value) and name in str(raised.value)
        assert ABSENT_METHODS.keys() == {
            row.name
            for row in rows
            if row.where == ENGINE and not hasattr(type(engine), row.name) and row.kind == "method"
        }
        with pytest.raises(AttributeError, match="neither the engine nor its module"):
            _ = engine.no_such_name
        # An attribute of the module has priority over a name that the engine lacks.
        engine.module.sparse_allreduce = torch.nn.Identity()
        assert isinstance(engine.sparse_allreduce, nn.Identity)


# -- parameters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "theirs, ours, problem",
    [
        ("(a, b=1)", lambda a, b=1: 0, None),
        ("(a, b=1)", lambda a, b=1, c=2, *, d=3: 0, None),
        ("(a, b=1)", lambda a=0, b=1: 0, None),
        ("(a, b=1)", lambda a, **rest: 0, None),
        ("(a, b={})", lambda a, b=None: 0, None),
        ("(a, b=Thing.x)", lambda a, b=7: 0, None),
        ("(*args, **kwargs)", lambda *args, **kwargs: 0, None),
        ("(a, *, b=1)", lambda a, b=1: 0, None),
        ("(lr=1e-3)", lambda lr=0.001: 0, None),
        ("()", lambda: 0, None),
        ("(a, b=1)", lambda a, b=2: 0, "has b=2 instead of 1"),
        ("(a, b=1)", lambda a, b: 0, "needs b"),
        ("(a, b=None)", lambda a, b=(): 0, "has b=() instead of None"),
        ("(a)", lambda a, b: 0, "needs b"),
        ("(a, b)", lambda a: 0, "has no b"),
        ("(a, b)", lambda b, a: 0, "has a at another place; has b at another place"),
        ("(a, b)", lambda a, *, b: 0, "has b at another place"),
        ("(a, *args)", lambda a: 0, "takes no further arguments"),
        ("(a, **kwargs)", lambda a: 0, "takes no further keyword arguments"),
    ],
)
def test_parameters(theirs, ours, problem) -> None:
    assert "; ".join(misfits(theirs, inspect.signature(ours))) == (problem or "")


def test_main_says_how_it_is_called(capsys) -> None:
    assert main(["a", "b"]) == 2 and "usage" in capsys.readouterr().err
