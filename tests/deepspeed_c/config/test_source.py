"""Configurations from files of JSON and Hjson, from base64 text and from malformed text: the results, and the message of
each failure.

If DSC_PEER_PYTHON names a Python that has DeepSpeed, DeepSpeed's reader reads the same Hjson files.
"""

import base64
import json
import os
import sys

import pytest

from deepspeed_c.config.cli import main
from deepspeed_c.config.inference import load_inference_config
from deepspeed_c.config.source import copy_plain, read_source
from deepspeed_c.errors import ConfigError
from tests.waits import ran

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
        ("", "line 1, column 1"), (" \n ", "line 1, column 1"), ('{"a": 1', "line 1, column 8"),
        ('{\n  "a": 1,\n  "b": }', "line 3, column 8 is not Hjson"),
        ('{\n  # why\n  "a": [1, 2\n}', "line 4, column 1 is not Hjson"),
        ('{\n  # why\n  "a": [1, 2\n}', "plain JSON, line 2, column 3"),
        ('{"a": 1} b', "line 1, column 10 is not Hjson (Extra data)"),
        ("{\n/* why", "line 2, column 7 is not Hjson (a comment"), ("{\n  a: '''why", "line 2, column 12 is not Hjson"),
        ("{\n  a b: 1\n}", "line 2, column 4 is not Hjson"), ("words and nothing else", "JSON string"),
        ("{a: 1, a: 2}", "twice: a"), ("# why\na: 1\nb: {c: 1, c: 2}", "twice: c"), ("{a: " + "[" * 100_000, "deep"),
        ("{a: 1" + "0" * 5000 + "}", "number that cannot be read"), ("{a: 1e400}", "number that cannot be read"),
        ("[1]", "JSON list"), ('"text"', "JSON string"), ("null", "JSON null"), ("true", "JSON boolean"),
        ("3", "JSON number"), ('{"a": 1, "a": 2}', "twice: a"),
        ('{"b": {"c": 1, "d": 2, "d": 3, "c": 4}}', "twice: c, d"), ('{"a": ' + "[" * 100_000, "deep"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "deep"), ('{"a": 1' + "0" * 5000 + "}", "number that cannot be read"),
        ("{\x00}", "line 1, column 2 is not Hjson"),
    ],
)  # fmt: skip
def test_malformed_file(tmp_path, text, part):
    path = tmp_path / "c.json"
    path.write_text(text, encoding="utf-8")
    message = failure(path)
    assert part in message and str(path) in message, message


# Files that plain JSON refuses -> what is in them.
HJSON = [
    ('{"a": 1,}', {"a": 1}),
    ('{\n  // why\n  "a": 1, "b": [1, 2,],\n}', {"a": 1, "b": [1, 2]}),
    ('{"a": 1 # why\n}', {"a": 1}),
    ("{'a': 1, /* why\n so */ 'b': 'c\"d'}", {"a": 1, "b": 'c"d'}),
    ("{\n  a: 1\n  b: two words, and more # with this\n}", {"a": 1, "b": "two words, and more # with this"}),
    (
        "# no braces\ntrain_batch_size: 8\nzero_optimization: {\n  stage: 2\n}\n",
        {"train_batch_size": 8, "zero_optimization": {"stage": 2}},
    ),
    ("{\n  note:\n    '''\n    first\n      second\n    '''\n}", {"note": "first\n  second"}),
    (
        "{a: 5e8, b: 0.001, c: -1.5E-3, d: 1.0, e: 0x10\n}",
        {"a": 500000000, "b": 0.001, "c": -0.0015, "d": 1, "e": "0x10"},
    ),
    ("{a: true, b: false, c: null, d: True\n}", {"a": True, "b": False, "c": None, "d": "True"}),
    ("{a: [1\n2\n3], b: [one\ntwo\n], c: {}, d: [],}", {"a": [1, 2, 3], "b": ["one", "two"], "c": {}, "d": []}),
    ("\ufeff{\r\n  // \u00fc\r\n  a: \u00df\r\n}\r\n", {"a": "\u00df"}),
    ("# a comment alone", {}),
]


@pytest.mark.parametrize("text, keys", HJSON, ids=range(len(HJSON)))
def test_hjson(tmp_path, text, keys):
    path = tmp_path / "c.json"
    path.write_text(text, encoding="utf-8", newline="")
    found = read_source(path)
    assert found == (keys, str(path)), found
    assert [type(value) for value in found.keys.values()] == [type(value) for value in keys.values()]


PEER = os.environ.get("DSC_PEER_PYTHON", "")
# Reads each file as the constructor of DeepSpeed's configuration does: the keys as they were written.
SCRIPT = """
import json, sys
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
print("READ " + json.dumps([load_ds_config(path) for path in json.load(sys.stdin)]))
"""


@pytest.mark.skipif(not PEER, reason="DSC_PEER_PYTHON names no Python that has DeepSpeed")
def test_deepspeed_reads_the_same_hjson(tmp_path):
    paths = [tmp_path / f"{i}.json" for i in range(len(HJSON))]
    for path, (text, _) in zip(paths, HJSON):
        path.write_text(text, encoding="utf-8", newline="")
    done = ran([PEER, "-c", SCRIPT], input=json.dumps([str(path) for path in paths]))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("READ ")]
    theirs = json.loads(line.removeprefix("READ "))
    for path, (text, _), their_keys in zip(paths, HJSON, theirs, strict=True):
        assert json.dumps(read_source(path).keys) == json.dumps(their_keys), text


def test_cut_files_are_read_or_refused_with_their_place(tmp_path):
    """A file of which only the beginning was written."""
    path = tmp_path / "c.json"
    refused = 0
    for text, _ in HJSON:
        for end in range(1, len(text)):
            path.write_text(text[:end], encoding="utf-8", newline="")
            try:
                read_source(path)
            except ConfigError as error:
                refused += 1
                assert str(path) in str(error), (text[:end], error)
                assert "line " in error.what or "JSON " in error.what, (text[:end], error)
    assert refused > 300, refused


def test_every_way_in_reads_hjson(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text("{\n  // why\n  train_batch_size: 8\n  optimizer: {type: AdamW\n  }\n}")
    assert main(["check", str(path)]) == 0, capsys.readouterr()
    assert main(["show", str(path), "--world-size", "2"]) == 0
    assert "AdamW" in capsys.readouterr().out
    encoded = base64.urlsafe_b64encode(b"# why\ntrain_batch_size: 8").decode()
    assert read_source(encoded) == ({"train_batch_size": 8}, "base64 text")
    path.write_text("{\n  # why\n  max_out_tokens: 99,\n}")
    assert load_inference_config(str(path), {}).max_out_tokens == 99


def test_plain_json_does_not_import_hjson(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"steps_per_print": 1e3}')
    code = (
        "import sys; from deepspeed_c.config.source import read_source\n"
        "for name in sys.argv[1:]: print(read_source(name).keys, 'hjson' in sys.modules)\n"
    )
    other = tmp_path / "other.json"
    other.write_text("{steps_per_print: 1e3}")
    done = ran([sys.executable, "-c", code, str(path), str(other)], check=True)
    # Plain JSON keeps a number as it was written.
    assert done.stdout.split("\n")[:2] == ["{'steps_per_print': 1000.0} False", "{'steps_per_print': 1000} True"]


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
