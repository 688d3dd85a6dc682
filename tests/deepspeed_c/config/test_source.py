"""Configurations from files, from base64 text and from malformed JSON: the results, and the message of each failure."""

import base64
import json
import os

import pytest

from deepspeed_c.config.source import copy_plain, read_source
from deepspeed_c.errors import ConfigError

TREE = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "x-ü": ["ß", None, 1e-5]}


def failure(source):
    with pytest.raises(ConfigError) as error:
        read_source(source)
    assert error.value.where and error.value.fix, str(error.value)
    return str(error.value)


@pytest.mark.parametrize("as_path", [str, lambda path: path])
def test_file(tmp_path, as_path):
    path = tmp_path / "ds config.json"
    path.write_text(json.dumps(TREE), encoding="utf-8")
    assert read_source(as_path(path)) == (TREE, str(path))


def test_file_with_byte_order_mark(tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(TREE).encode())
    assert read_source(path)[0] == TREE


def test_infinity_in_a_file(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"steps_per_print": Infinity}')
    assert read_source(path)[0] == {"steps_per_print": float("inf")}


@pytest.mark.parametrize("encode", [base64.urlsafe_b64encode, base64.b64encode])
@pytest.mark.parametrize("padding", ["", "x", "xx"])
def test_base64(encode, padding):
    # Three lengths give every number of padding signs. The last letters encode to characters that only one alphabet
    # has.
    tree = {**TREE, "x-pad": padding + "???>>>~~~"}
    text = encode(json.dumps(tree, ensure_ascii=False).encode()).decode()
    assert read_source(text) == (tree, "base64 text")
    assert read_source(text.rstrip("=")) == (tree, "base64 text")


def test_long_base64_is_not_taken_for_a_path():
    tree = {"x-long": "a" * 100_000}
    assert read_source(base64.urlsafe_b64encode(json.dumps(tree).encode()).decode())[0] == tree


def test_a_file_wins_over_base64(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = base64.urlsafe_b64encode(b"{}").decode()
    (tmp_path / name).write_text('{"seed": 1}')
    assert read_source(name) == ({"seed": 1}, name)


@pytest.mark.parametrize(
    "text, part",
    [
        ("", "line 1, column 1"),
        ('{"a": 1,}', "comma before a closing bracket"),
        ('{\n  // why\n  "a": 1}', "no comments"),
        ('{"a": 1 # why\n}', "no comments"),
        ('{"a": 1', "line 1, column 8"),
        ("{'a': 1}", "line 1, column 2"),
        ("[1]", "JSON list"),
        ('"text"', "JSON string"),
        ("null", "JSON null"),
        ("true", "JSON boolean"),
        ("3", "JSON number"),
        ('{"a": 1, "a": 2}', "twice: a"),
        ('{"b": {"c": 1, "d": 2, "d": 3, "c": 4}}', "twice: c, d"),
        ('{"a": ' + "[" * 100_000, "deep"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "deep"),
        ('{"a": 1' + "0" * 5000 + "}", "number that cannot be read"),
        ("{\x00}", "not JSON"),
    ],
)
def test_malformed_file(tmp_path, text, part):
    path = tmp_path / "c.json"
    path.write_text(text, encoding="utf-8")
    message = failure(path)
    assert part in message and str(path) in message, message


def test_not_utf8(tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(b'{"a": "\xff"}')
    assert "UTF-8" in failure(path)


def test_missing_file_directory_and_no_permission(tmp_path):
    assert "no such file" in failure("missing.json")
    assert "no such file" in failure("missing")
    assert "cannot be read" in failure(tmp_path)
    assert "cannot be read" in failure("a\0b")
    path = tmp_path / "c.json"
    path.write_text("{}")
    path.chmod(0)
    if os.geteuid() != 0:
        assert "cannot be read" in failure(path)


def test_json_text_is_pointed_to_json_loads():
    assert "json.loads" in failure('{"train_batch_size": 8}')


@pytest.mark.parametrize(
    "text", ["AAAA", "abc", base64.b64encode(b"\xff\xfe").decode(), base64.b64encode(b"[1]").decode()]
)
def test_text_that_is_no_base64_json(text):
    assert "no such file" in failure(text)


def test_base64_of_malformed_json():
    assert "base64 text" in failure(base64.b64encode(b'{"a": }').decode())


@pytest.mark.parametrize("source", [None, 3, ["a"], object()])
def test_other_types(source):
    assert type(source).__name__ in failure(source)


def test_copy_shares_nothing_that_can_change():
    tree = {"a": [1, {"b": [2]}], "c": ({"d": 3},)}
    copied = copy_plain(tree, "here")
    assert copied == tree
    copied["a"][1]["b"].append(4)
    copied["c"][0]["d"] = 5
    assert tree == {"a": [1, {"b": [2]}], "c": ({"d": 3},)}
