"""Keys of features that do not exist. A key that asks for such a feature is refused. A key that switches it off, or
that only tunes it, is accepted."""

import typing

import msgspec
import pytest

from deepspeed_c.config import load_config, problems_of
from deepspeed_c.config.features import FEATURES
from deepspeed_c.config.keys import Section
from deepspeed_c.config.schema import arms, bare, fields_of, find, kinds_of, walk
from deepspeed_c.errors import UnsupportedConfigError


def tree_of(path, value):
    """A configuration with only this key. Containers get one entry."""
    tree = value
    for part in reversed(path.replace("<name>", "g1").replace("[]", ".[]").split(".")):
        tree = [tree] if part == "[]" else {part: tree}
    return tree


def written(path):
    return path.replace("<name>", "g1").replace("[]", "[0]")


def other_values(field):
    """Values that ask for the feature: for each type of the key, a value that is neither the default nor off."""
    for arm in arms(field.hint):
        kind = bare(arm)
        if isinstance(kind, type) and issubclass(kind, Section):
            # The section is present, with a key whose value is not the default.
            inner = [each for each in fields_of(kind).values() if each.name != "enabled" and each.section is None]
            yield next({each.name: value} for each in inner for value in other_values(each) if value != each.default)
            if "enabled" in fields_of(kind):
                yield {"enabled": True}
        elif kind is bool:
            yield from (value for value in (True, False) if value is not field.default and value not in field.info.off)
        elif kind is str:
            yield "text"
        elif typing.get_origin(kind) is tuple:
            words = typing.get_args(bare(typing.get_args(kind)[0]))
            yield next([word] for word in words if (word,) not in field.info.off)
        elif kind is int:
            yield 8
        elif kind is float:
            yield 0.5
        elif typing.get_origin(kind) is typing.Literal:
            yield from (word for word in typing.get_args(kind) if word != field.default and word not in field.info.off)


PLAIN = [(path, field) for path, field in walk() if not path.startswith(("optimizer.params.", "scheduler.params."))]
ASKING = [(path, field) for path, field in PLAIN if field.info.is_switch]
SWITCHES = [(path, field) for path, field in ASKING if not field.info.is_built]
BUILT_SWITCHES = [(path, field) for path, field in ASKING if field.info.is_built]
TUNING = [
    (path, field) for path, field in PLAIN if field.info.feature and not field.info.is_switch and field.section is None
]


def test_there_are_switches_and_tuning_keys():
    assert len(SWITCHES) > 30 and len(TUNING) > 200


@pytest.mark.parametrize("path, field", SWITCHES, ids=[path for path, _ in SWITCHES])
def test_switch_is_refused_when_on_and_accepted_when_off(path, field):
    values = list(other_values(field))
    assert values, path
    for value in values:
        problems = [
            problem for problem in problems_of(tree_of(path, value), batch="skip") if problem.where == written(path)
        ]
        assert len(problems) == 1, (path, value)
        assert isinstance(problems[0], UnsupportedConfigError) and isinstance(problems[0], NotImplementedError)
        feature = FEATURES[field.info.feature]
        assert feature.title in problems[0].what and problems[0].fix == feature.instead
    for value in (field.default, *field.info.off):
        if field.section is None or value is None:
            assert problems_of(tree_of(path, value), batch="skip") == [], (path, value)


@pytest.mark.parametrize("path, field", BUILT_SWITCHES, ids=[path for path, _ in BUILT_SWITCHES])
def test_switch_of_what_is_built_is_not_refused_for_itself(path, field):
    """The switch of a built feature may need other keys. It is never refused as a missing feature."""
    for value in (*other_values(field), field.default, *field.info.off):
        if field.section is None or value is None:
            problems = problems_of(tree_of(path, value), batch="skip")
            assert not any(isinstance(problem, UnsupportedConfigError) for problem in problems), (path, value, problems)


@pytest.mark.parametrize("path, field", TUNING, ids=[path for path, _ in TUNING])
def test_tuning_key_is_accepted_and_reported_as_unused(path, field):
    value = {bool: True, int: 5, float: 0.5, str: "text", dict: {"a": 1}}.get(_first(field))
    if value is None:
        value = _example(field)
    problems = [
        problem for problem in problems_of(tree_of(path, value), batch="skip") if problem.where == written(path)
    ]
    assert problems == [], (path, value)
    if any(
        part in path
        for part in ("zenflow.", "zeropp", "sparse_attention.", "weight_quantization.", "datastates", "writer.")
    ):
        return  # the section asks for its feature by its presence, so another test covers it
    config = load_config(tree_of(path, value), world_size=1, batch="skip")
    assert written(path) in config.summary_line(), path
    row = next(row for row in config.rows() if row.key.split("[")[0] == written(path).split("[")[0])
    assert FEATURES[field.info.feature].title in row.note


def _first(field):
    kind = bare(next(arm for arm in arms(field.hint) if arm is not type(None)))
    return dict if isinstance(kind, type) and issubclass(kind, dict) else kind


def _example(field):
    """An example of a value: the last of the allowed words, or a list with one entry."""
    kind = _first(field)
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)[-1]
    entry = bare(typing.get_args(kind)[0])
    if typing.get_origin(entry) is typing.Literal:
        return [typing.get_args(entry)[0]]
    return [{int: 5, str: "text"}.get(entry, "any")]


def test_what_hugging_face_writes_for_other_stages_is_harmless_at_stage_2():
    zero = {
        "stage": 2, "offload_optimizer": {"device": "none", "nvme_path": None, "pin_memory": True},
        "offload_param": {"device": "none", "nvme_path": None}, "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_max_live_parameters": 1e9, "stage3_prefetch_bucket_size": 5e7, "sub_group_size": 1e12,
    }  # fmt: skip
    config = load_config({"zero_optimization": zero}, world_size=1, batch="skip")
    assert config.zero.stage == 2
    assert "unused" in config.summary_line()


def test_keys_of_stage_3_act_at_stage_3_only():
    tree = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e8}}
    config = load_config(tree, world_size=1, batch="skip")
    assert config.zero.stage == 3 and config.zero.overlap_comm is True
    assert "unused" not in config.summary_line()
    acting = [row for row in config.rows() if row.key.startswith("zero_optimization.stage3_max")]
    assert acting and not any(row.note for row in acting), acting
    tree["zero_optimization"]["stage"] = 2
    config = load_config(tree, world_size=1, batch="skip")
    assert "unused: zero_optimization.stage3_max_live_parameters" in config.summary_line()


def test_a_missing_feature_is_refused_and_one_line_enables_it(monkeypatch):
    tree = {"amp": {"enabled": True}}
    (problem,) = problems_of(tree, batch="skip")
    assert isinstance(problem, UnsupportedConfigError) and problem.where == "amp.enabled"
    monkeypatch.setitem(FEATURES, "amp", FEATURES["amp"]._replace(is_built=True))
    assert problems_of(tree, batch="skip") == []


# Sections of missing features. A section that is null by default asks by its presence; others have a switch inside.
NULL_BY_DEFAULT = [(path, field) for path, field in SWITCHES if field.section is not None]
MISSING = [
    (path, field)
    for path, field in PLAIN
    if field.section is not None and not field.container and not field.info.is_built and "<" not in path
]


def defaults_of(section):
    return {
        field.name: defaults_of(field.section) if isinstance(field.default, Section) else field.default
        for field in fields_of(section).values()
        if field.default is not None
    }


def outermost(path):
    """The outermost section on the path that belongs to a missing feature. The note names this section."""
    known = {known for known, _ in MISSING}
    parts = path.split(".")
    return next(".".join(parts[:n]) for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in known)


def off_forms(field):
    yield {}
    if "enabled" in fields_of(field.section):
        yield {"enabled": False}
        yield defaults_of(field.section) | {"enabled": False}
    elif not field.info.is_switch:
        yield defaults_of(field.section)


def test_there_are_sections_of_missing_features():
    names = {path for path, _ in NULL_BY_DEFAULT}
    assert names == {
        "zero_optimization.zenflow", "zero_optimization.zeropp_loco_param", "checkpoint.writer", "datastates_ckpt",
        "sparse_attention", "weight_quantization",
    }  # fmt: skip
    assert len(MISSING) > 20, MISSING


@pytest.mark.parametrize("path, field", MISSING, ids=[path for path, _ in MISSING])
def test_section_that_leaves_a_missing_feature_off_is_a_note(path, field):
    for value in off_forms(field):
        assert problems_of(tree_of(path, value), batch="skip") == [], (path, value)
        config = load_config(tree_of(path, value), world_size=1, batch="skip")
        notes = [note for note in config.notes if note.startswith(outermost(path) + " = ")]
        assert len(notes) == 1 and len(config.notes) == 1, (path, value, config.notes)
        assert FEATURES[find(outermost(path)).info.feature].title in notes[0], (value, notes)
        config.summary_line()
        config.rows(everything=True)
        strict = problems_of(tree_of(path, value) | {"strict": True}, batch="skip")
        assert strict == [], (path, value, "a section that is off does what it says")


@pytest.mark.parametrize("path, field", NULL_BY_DEFAULT, ids=[path for path, _ in NULL_BY_DEFAULT])
def test_section_that_is_off_reads_as_if_it_were_not_there(path, field):
    for value in off_forms(field):
        config = load_config(tree_of(path, value), world_size=1, batch="skip")
        got, expected = config.resolved_dict(), load_config({}, world_size=1, batch="skip").resolved_dict()
        assert got == expected, (path, value)


def test_a_strict_configuration_may_be_written_out_and_read_again():
    """The resolved configuration has every section. Sections of missing features have their defaults."""
    first = load_config({"train_batch_size": 4, "strict": True}, world_size=1)
    again = load_config(first.resolved_dict(), world_size=1)
    assert again.strict and again.resolved_dict() == first.resolved_dict()


@pytest.mark.parametrize("path, field", NULL_BY_DEFAULT, ids=[path for path, _ in NULL_BY_DEFAULT])
def test_section_that_asks_by_being_there_is_refused(path, field):
    """In DeepSpeed any key of such a section asks for the feature, even with its default value."""
    given = defaults_of(field.section) or dict.fromkeys(fields_of(field.section), 1)
    given.pop("enabled", None)
    problems = problems_of(tree_of(path, given), batch="skip")
    assert problems and all(isinstance(problem, UnsupportedConfigError) for problem in problems), (
        path,
        given,
        problems,
    )
    assert problems_of(tree_of(path, {"//": "a comment"}), batch="skip") == []


@pytest.mark.parametrize("path, field", MISSING, ids=[path for path, _ in MISSING])
def test_section_of_a_missing_feature_with_a_wrong_key_is_refused(path, field):
    for value in off_forms(field):
        problems = problems_of(tree_of(path, value | {"no_such_key_here": 1}), batch="skip")
        assert [problem.where for problem in problems] == [f"{path}.no_such_key_here"], (path, value, problems)
        assert not any(isinstance(problem, UnsupportedConfigError) for problem in problems)


@pytest.mark.parametrize(
    "path, value",
    [
        ("weight_quantization", {"enabled": False, "num_bits": 4}),
        ("amp", {"enabled": False, "opt_level": "O2"}),
    ],
)
def test_other_keys_of_a_disabled_section_ask_for_nothing(path, value):
    config = load_config({path: value}, world_size=1, batch="skip")
    assert len(config.notes) == 1 and config.notes[0].startswith(path), config.notes


def test_a_section_inside_a_disabled_one_asks_by_its_own_switch():
    """The same holds in DeepSpeed, where only the inner switch decides whether tokens are dropped."""
    routing = {"enabled": False, "random_ltd": {"enabled": True}}
    tree = {"data_efficiency": {"enabled": False, "data_routing": routing}}
    (problem,) = problems_of(tree, batch="skip")
    assert isinstance(problem, UnsupportedConfigError), problem
    assert problem.where == "data_efficiency.data_routing.random_ltd.enabled"


def test_every_type_of_a_missing_feature_is_refused():
    for section, field in ((path, field) for path, field in walk() if kinds_of(field.section)):
        for kind in kinds_of(field.section).values():
            problems = problems_of({section: {"type": kind.name}}, batch="skip")
            refused = [problem for problem in problems if isinstance(problem, UnsupportedConfigError)]
            assert len(refused) == (kind.feature is not None), (section, kind.name)
            assert all(problem.where == f"{section}.type" for problem in refused)


def test_features_are_asked_for_in_the_default_of_nothing():
    """No default asks for a feature, so an empty configuration is accepted."""
    assert problems_of({}, batch="skip") == []
    assert all(field.default is not msgspec.NODEFAULT for _, field in SWITCHES)
