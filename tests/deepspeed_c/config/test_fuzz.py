"""Random configurations: each gives a Config or a ConfigError, and the input is not changed."""

import copy
import random

import pytest

from deepspeed_c.config import Config, load_config
from deepspeed_c.config.aliases import OLD_KEYS
from deepspeed_c.config.optim import OPTIMIZERS
from deepspeed_c.config.schedule import SCHEDULES
from deepspeed_c.config.schema import find, walk
from deepspeed_c.errors import ConfigError

PATHS = [path for path, _ in walk()] + [key.old for key in OLD_KEYS]
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 8, 10**40, 0.5, 5e8, -0.0, 5e-324, float("inf"), float("nan"),
    "", "auto", "none", "cpu", "true", "3", "1e-3", "bf16", "\0", "é" * 50, "x-", "[]", (), [], [1], ["a"], [[]],
    [0.9, 0.999], {}, {"enabled": True}, {"x-a": 1}, {"device": "cpu"}, {"": {}}, {"type": "Adam"}, {"params": {"lr": 1}},
    [{}], [{"patterns": "a"}], {"g": {}}, {"g": {"params": {"bits": "8"}}}, b"bytes", object, {1, 2}, 3 + 4j,
    *(kind.name for kind in (*OPTIMIZERS.values(), *SCHEDULES.values())),
]  # fmt: skip


def put(tree, path, value):
    *sections, last = path.replace("<name>", "g").replace("[]", "").split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            return
    tree[last] = value


def some_tree(rng):
    tree = {}
    for _ in range(rng.choice((1, 2, 5, 20))):
        path = rng.choice(PATHS)
        if rng.random() < 0.1:
            path = path.replace(rng.choice(path), rng.choice("._-xa"), 1)
        field = find(path)
        is_default = field is not None and field.section is None and rng.random() < 0.7
        value = field.default if is_default else copy.deepcopy(rng.choice(VALUES))
        value = dict(value) if isinstance(value, dict) else value  # a later key may be put into the copy
        if rng.random() < 0.1:
            tree[path] = value  # as a dotted key
        else:
            put(tree, path, value)
    return tree


def outcome(tree, **how):
    try:
        config = load_config(tree, **how)
    except ConfigError as error:
        assert error.what and str(error)
        return "error"
    assert isinstance(config, Config)
    assert "\n" not in config.summary_line() and config.table() and config.lines()
    again = load_config(config.resolved_dict(), world_size=how["world_size"], batch=how["batch"])
    assert again.lines() == config.lines()
    return "config"


@pytest.mark.parametrize("seed", range(8))
def test_random_configurations(seed):
    rng = random.Random(seed)
    seen = set()
    for n in range(100):
        tree = some_tree(rng)
        before = repr(tree)
        try:
            seen.add(outcome(tree, world_size=rng.choice((1, 2, 3)), batch=rng.choice(("skip", "skip", "resolve"))))
        except BaseException:
            print(f"seed {seed}, number {n}: {before}")
            raise
        assert repr(tree) == before
    assert seen == {"error", "config"}
