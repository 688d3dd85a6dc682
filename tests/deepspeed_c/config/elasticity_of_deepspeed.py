"""Write elasticity_of_deepspeed_0_19_6.json: answers of DeepSpeed's ``compute_elastic_config`` to random sections.

python tests/deepspeed_c/config/elasticity_of_deepspeed.py DEEPSPEED

DEEPSPEED is an unpacked source of DeepSpeed 0.19.6. Only its folder ``elasticity`` is run, so that its other
dependencies are not needed. A case is [section, lists of numbers of ranks, calls]; a call is [world_size, WORLD_SIZE of
the environment, return_microbatch, answer]; an answer is null where DeepSpeed raises an error, else [batch, index of the
numbers of ranks in the lists], with a micro-batch behind them in answers of three.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import sys
import types
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("elasticity_of_deepspeed_0_19_6.json")
N_SECTIONS = 400
VERSION = "0.19.6"
PRIMES = (2, 3, 5, 7, 11, 13, 17, 31, 61, 97)
WRONG = [
    {"micro_batch_sizes": [2, 0]},
    {"micro_batch_sizes": [2, -4]},
    {"micro_batch_sizes": [2, 2.5]},
    {"micro_batch_sizes": 4},
    {"micro_batch_sizes": []},
    {"min_gpus": 0},
    {"max_gpus": 0},
    {"min_gpus": 9, "max_gpus": 8},
    {"model_parallel_size": 0},
    {"num_gpus_per_node": 0},
    {"min_time": -1},
    {"version": 0.3},
    {"version": 0.15},
    {"enabled": False},
    {"version": 0.1, "model_parallel_size": 2},
]


def load(source: Path) -> Any:
    """The module ``elasticity`` of a DeepSpeed source, below packages that hold only its imports."""
    for name, path in (("deepspeed", source / "deepspeed"), ("deepspeed.elasticity", source / "deepspeed/elasticity")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    for name, values in (
        ("deepspeed.git_version_info", {"version": VERSION}),
        ("deepspeed.utils", {"logger": logging.getLogger("deepspeed")}),
    ):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    return importlib.import_module("deepspeed.elasticity.elasticity")


def random_section(draw: random.Random) -> dict[str, Any]:
    n_sizes = draw.choice((1, 1, 2, 3, 3, 4, 6))
    sizes = [draw.choice((draw.randint(1, 8), draw.randint(1, 64), draw.choice(PRIMES))) for _ in range(n_sizes)]
    most = draw.choice((draw.randint(1, 40), draw.randint(8, 3000), draw.randint(100, 100_000)))
    if draw.random() < 0.9:
        most += max(sizes)
    section: dict[str, Any] = {"enabled": True, "max_train_batch_size": most, "micro_batch_sizes": sizes}
    section["version"] = draw.choice((0.1, 0.2, 0.2, "0.1", "0.2"))
    if draw.random() < 0.5:
        section["min_gpus"] = draw.choice((1, 2, 7, draw.randint(1, 300)))
        section["max_gpus"] = section["min_gpus"] + draw.choice((0, 1, 6, draw.randint(0, 2000)))
    if draw.random() < 0.5:
        section["prefer_larger_batch"] = draw.random() < 0.4
    if draw.random() < 0.5 and float(section["version"]) == 0.2:
        section["num_gpus_per_node"] = draw.choice((1, 2, 3, 4, 7, 8, 16, 49))
        section["model_parallel_size"] = draw.choice((1, 1, 1, 1, 2, 4, 8, 3))
    if draw.random() < 0.1:
        section |= draw.choice(WRONG)
    if draw.random() < 0.03:
        del section[draw.choice(("max_train_batch_size", "micro_batch_sizes", "enabled"))]
    return section


def answer(compute: Any, section: dict[str, Any], world: int, environment: int | None, micro: bool) -> Any:
    os.environ.pop("WORLD_SIZE", None)
    if environment is not None:
        os.environ["WORLD_SIZE"] = str(environment)
    try:
        return compute({"elasticity": section}, VERSION, world_size=world, return_microbatch=micro)
    except Exception:  # noqa: BLE001  (whatever it raises, DeepSpeed does not run then)
        return None


def case(compute: Any, section: dict[str, Any], draw: random.Random) -> list[Any]:
    lists: list[Any] = []
    calls = []

    def call(world: int, environment: int | None, micro: bool) -> Any:
        found = answer(compute, section, world, environment, micro)
        if found is not None:
            numbers = None if found[1] is None else [int(n) for n in found[1]]
            if numbers not in lists:
                lists.append(numbers)
            found = [int(found[0]), lists.index(numbers), *found[2:]]
        calls.append([world, environment, micro, found])
        return found

    call(0, None, False)
    first = call(0, draw.randint(1, 64), False)
    valid = lists[first[1]] if first else None
    call(0, draw.choice(valid or [8]), True)
    call(0, draw.randint(1, 64), True)
    for world in (1, draw.randint(2, 16), draw.randint(1, 500), *draw.choices(valid or [4], k=2)):
        call(world, None, draw.random() < 0.5)
    return [section, lists, calls]


def main() -> None:
    compute = load(Path(sys.argv[1])).compute_elastic_config
    draw = random.Random(75)
    cases = [case(compute, random_section(draw), draw) for _ in range(N_SECTIONS)]
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in cases)
    TABLE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
