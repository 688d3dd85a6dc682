"""ops/scope.py: the declarations of optimizers, and the defaults for optimizers without a declaration.

The engine must use no other knowledge about optimizers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepspeed_c.config.optim import OPTIMIZERS
from deepspeed_c.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed_c.ops.lamb import FusedLamb
from deepspeed_c.ops.muon import Muon
from deepspeed_c.ops.optim import BY_TYPE, FusedOptimizer
from deepspeed_c.ops.scope import declaration

ROOT = Path(__file__).resolve().parents[2] / "deepspeed_c"


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(3))]


def classes(base: type) -> Iterator[type]:
    for found in base.__subclasses__():
        yield from (found, *classes(found))


class MyAdam(torch.optim.Adam):
    """An optimizer of the user, whose step may do anything."""


@pytest.mark.parametrize(
    ("make", "scope", "updates_buckets"),
    [
        (FusedAdam, "element", True),
        (FusedLamb, "norms", True),
        (Muon, "matrix", True),
        (torch.optim.AdamW, "element", False),
        (torch.optim.LBFGS, None, False),
        (MyAdam, None, False),
    ],
)
def test_declarations(make, scope, updates_buckets):
    declared = declaration(make(params()))
    assert (declared.scope, declared.updates_buckets) == (scope, updates_buckets)
    assert not declared.is_quantized


def test_groups_may_differ():
    declared = declaration(Muon(params()))
    assert [declared.scope_of_group(i) for i in range(2)] == ["matrix", "element"]
    assert declaration(FusedLamb(params())).scope_of_group(0) == "norms"
    assert declaration(torch.optim.SGD(params(), lr=0.1)).scope_of_group(0) == "element"


def test_what_deepspeed_has_fused():
    assert declaration(FusedAdam(params())).is_fused_in_deepspeed
    for other in (DeepSpeedCPUAdam(params()), FusedLamb(params()), torch.optim.Adam(params())):
        assert not declaration(other).is_fused_in_deepspeed


def test_a_configuration_names_each_class():
    """The table of the configuration, which needs no torch, agrees with the declarations of the classes."""
    assert set(BY_TYPE) == {name for name, kind in OPTIMIZERS.items() if kind.params and not kind.feature}


OPTIMIZERS_OF_TORCH = {c.__name__ for c in vars(torch.optim).values() if isinstance(c, type)} - {"Optimizer"}
OURS = {c.__name__ for c in classes(FusedOptimizer) if c.__module__.startswith("deepspeed_c.")}


def names_in(source: str) -> set[str]:
    """The optimizer classes that source code refers to: by a name, by a string, or by an isinstance check for
    FusedOptimizer.
    """
    known = OURS | OPTIMIZERS_OF_TORCH
    spelled = {name.lower() for name in known} | set(BY_TYPE)
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lower() in spelled:
            found.add(node.value)
        words = {getattr(node, key, None) for key in ("id", "attr")}
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            words |= {alias.name.rpartition(".")[2] for alias in node.names}
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            found |= {word for word in ("FusedOptimizer",) if word in ast.unparse(node)}
        found |= words & known
    return found


def test_the_engine_knows_no_optimizer_by_name():
    paths = [ROOT / "engine" / "trainable.py", ROOT / "engine" / "build.py"]
    paths += [path for folder in ("zero", "offload", "plan") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 30
    found = {str(path.relative_to(ROOT)): names for path in paths if (names := names_in(path.read_text()))}
    assert found == {"plan/prepared.py": {"AdamW"}}  # the plan's default optimizer


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from deepspeed_c.ops.muon import Muon", "Muon"),
        ("x = torch.optim.AdamW(groups)", "AdamW"),
        ("if isinstance(base, ops.FusedLamb): pass", "FusedLamb"),
        ("if isinstance(base, FusedOptimizer): pass", "FusedOptimizer"),
        ("if kind.lower() == 'muon': pass", "muon"),
        ("if type(base).__name__ == 'FusedSGD': pass", "FusedSGD"),
    ],
)
def test_the_search_finds_what_it_should(source, name):
    assert names_in(source) == {name}
    assert names_in("def f(base: torch.optim.Optimizer, ours: FusedOptimizer): 'For Muon and AdamW.'") == set()
