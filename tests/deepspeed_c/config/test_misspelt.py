"""For every key of the schema, a name that is misspelt by one edit raises an error that names the right key."""

import pytest

from deepspeed_c.config import load_config, problems_of
from deepspeed_c.config.aliases import OLD_KEYS
from deepspeed_c.config.optim import OPTIMIZERS
from deepspeed_c.config.schedule import SCHEDULES
from deepspeed_c.config.schema import Root, fields_of, kinds_of

OLD = {key.old for key in OLD_KEYS}


def edits(name):
    """Deterministic one-edit misspellings: a letter dropped, doubled, or swapped with the next, at three places."""
    for i in sorted({0, len(name) // 2, len(name) - 1}):
        yield name[:i] + name[i + 1 :]
        yield name[: i + 1] + name[i:]
        if i + 1 < len(name) and name[i] != name[i + 1]:
            yield name[:i] + name[i + 1] + name[i] + name[i + 2 :]


def sections(cls=Root, path=(), outer=()):
    """For every place that has keys: (its path in messages, the names of its keys, a function that puts a dict
    there)."""

    def place(content):
        tree = content
        for wrap in reversed(outer):
            tree = wrap(tree)
        return tree

    yield ".".join(path), list(fields_of(cls)), place
    for field in fields_of(cls).values():
        if field.section is not None:
            wraps = {
                "": (path + (field.name,), lambda inner, n=field.name: {n: inner}),
                "dict": (path + (field.name, "g1"), lambda inner, n=field.name: {n: {"g1": inner}}),
                "list": (path + (f"{field.name}[0]",), lambda inner, n=field.name: {n: [inner]}),
            }
            below, wrap = wraps[field.container]
            yield from sections(field.section, below, (*outer, wrap))
        elif field.name == "params" and kinds_of(cls):
            for kind in kinds_of(cls).values():
                if kind.params is not None:

                    def wrap(inner, kind=kind):
                        return {"type": kind.name, "params": inner}

                    names = list(fields_of(kind.params))
                    yield ".".join((*path, "params")), names, lambda inner, wrap=wrap, place=place: place(wrap(inner))


ALL = list(sections())


def test_all_kinds_of_places_are_walked():
    paths = {path for path, _, _ in ALL}
    assert {"", "fp16", "zero_optimization.offload_param", "optimizer.params", "scheduler.params"} <= paths
    assert "tensor_parallel.partition_config.layer_specs[0]" in paths
    assert "compression_training.row_pruning.different_groups.g1.params" in paths
    assert len([1 for path, _, _ in ALL if path == "optimizer.params"]) == sum(
        k.params is not None for k in OPTIMIZERS.values()
    )
    assert len([1 for path, _, _ in ALL if path == "scheduler.params"]) == sum(
        k.params is not None for k in SCHEDULES.values()
    )


@pytest.mark.parametrize("path, names, place", ALL, ids=[f"{i}-{path or 'top'}" for i, (path, _, _) in enumerate(ALL)])
def test_misspelt_key_raises_and_names_the_right_one(path, names, place):
    prefix = f"{path}." if path else ""
    n_tried = 0
    for name in names:
        for wrong in edits(name):
            if wrong in names or prefix + wrong in OLD or not wrong or wrong.startswith("_"):
                continue  # the edit made another existing key, or a comment
            problems = problems_of(place({wrong: 1}), batch="skip")
            hits = [problem for problem in problems if problem.where == prefix + wrong]
            assert len(hits) == 1, (wrong, [str(problem) for problem in problems])
            assert hits[0].what == "is not a known key"
            assert prefix + name in hits[0].fix.replace("?", " ").replace(",", " ").split(), (wrong, name, hits[0].fix)
            n_tried += 1
    assert n_tried >= len(names)


@pytest.mark.parametrize("junk", ["-", "0", "stage ", "Stagé", "fp16,enabled"])
@pytest.mark.parametrize("path", ["", "zero_optimization", "fp16"])
def test_junk_key_raises(path, junk):
    problems = problems_of({path: {junk: 1}} if path else {junk: 1}, batch="skip")
    assert [problem.what for problem in problems] == ["is not a known key"]


@pytest.mark.parametrize("junk", ["zzzzzz", "x" * 500, "monitor-config"])
def test_key_that_is_like_none_raises_in_a_section_and_is_noted_at_the_top(junk):
    for path in ("zero_optimization", "fp16"):
        (problem,) = problems_of({path: {junk: 1}}, batch="skip")
        assert problem.what == "is not a known key"
    assert load_config({junk: 1}, world_size=1, batch="skip").notes == (
        f"{junk} is not a known key and is like none: it has no effect",
    )


@pytest.mark.parametrize(
    "name, meant",
    [
        ("grad_clip", "gradient_clipping"), ("max_grad_norm", "gradient_clipping"),
        ("gradient_accumulation", "gradient_accumulation_steps"), ("vocab_size", "vocabulary_size"),
        ("optim", "optimizer"), ("zero", "zero_optimization"), ("zero_stage", "zero_optimization.stage"),
        ("zero3", "zero_optimization.stage"), ("learning_rate", "optimizer.params.lr"),
        ("comments_logger", "comms_logger"), ("half", "fp16"),
    ],
)  # fmt: skip
def test_short_and_foreign_names_of_a_key_raise_and_name_it(name, meant):
    (problem,) = problems_of({name: 1}, batch="skip")
    assert problem.what == "is not a known key" and meant in problem.fix, problem


def test_key_of_another_section_is_pointed_to():
    (problem,) = problems_of({"stage": 2}, batch="skip")
    assert "did you mean zero_optimization.stage?" in problem.fix
    (problem,) = problems_of({"fp16": {"gradient_clipping": 1}}, batch="skip")
    assert "did you mean gradient_clipping?" in problem.fix
    (problem,) = problems_of({"lr": 1}, batch="skip")
    assert "optimizer.params.lr" in problem.fix


def test_misspelt_section_of_a_dotted_key():
    (problem,) = problems_of({"zero_optimizaton.stage": 2}, batch="skip")
    assert "did you mean zero_optimization?" in problem.fix
    (problem,) = problems_of({"zero_optimization.stge": 2}, batch="skip")
    assert "did you mean zero_optimization.stage?" in problem.fix


def test_case_and_dashes_are_near():
    for wrong in ("Gradient-Clipping", "GRADIENT_CLIPPING"):
        (problem,) = problems_of({wrong: 1}, batch="skip")
        assert "did you mean gradient_clipping?" in problem.fix
