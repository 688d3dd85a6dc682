"""Structured output: answers of a random model are JSON of their schema, match their expression, or are one of the
choices; impossible forms are refused before work."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_c.errors import ModelError
from deepspeed_c.inference.v2 import RaggedInferenceEngineConfig, build_hf_engine
from deepspeed_c.ops.sample import Rules
from deepspeed_c.server.errors import RequestRefused
from deepspeed_c.server.structured import TokenGrammar, grammar_of, grammar_of_tools
from deepspeed_c.server.tools import HermesToolParser, Llama3ToolParser, MistralToolParser
from deepspeed_c.serving import FinishReason, RequestLoop, SamplingParams
from tests.deepspeed_c.serving.folders import byte_tokenizer, model_folder

pytest.importorskip("llguidance")

END = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["größer", "日", 'a"b']},
        "n": {"type": "integer", "minimum": -5, "maximum": 12},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
        "none": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "kind", "n", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "pattern": "^[a-c]{2,3}$"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": 'say "ü"'}},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_folder(tmp_path_factory.mktemp("model"))


def form(tokenizer: Any, response_format: Any = None, **structured: Any) -> TokenGrammar:
    found = grammar_of(response_format, structured, tokenizer, len(tokenizer), {END})
    assert found is not None
    return found


def written(grammar: TokenGrammar, tokenizer: Any, seed: int, n_most: int = 600) -> str | None:
    """The text that random logits give; None if it does not end."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    while len(tokens) < n_most:
        logits = torch.randn(len(tokenizer), generator=generator)
        grammar.mask(logits)
        token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        grammar.accept(token)
        if token == END:
            return tokenizer.decode(tokens)
        tokens.append(token)
    return None


def check(found: Any) -> None:
    """Whether a value is one of SCHEMA, by hand."""
    assert isinstance(found, dict) and {"name", "kind", "n", "tags"} <= found.keys() <= SCHEMA["properties"].keys(), (
        found
    )
    assert isinstance(found["name"], str) and len(found["name"]) <= 4, found
    assert found["kind"] in ("größer", "日", 'a"b'), found
    assert type(found["n"]) is int and -5 <= found["n"] <= 12, found
    assert isinstance(found["tags"], list) and 1 <= len(found["tags"]) <= 3, found
    assert all(re.fullmatch("[a-c]{2,3}", tag) for tag in found["tags"]), found
    assert found.get("none") in (None, True, False), found


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA, "regex": None}},
    ],
)
def test_answers_are_json_of_their_schema(tokenizer: Any, fields: dict[str, Any]) -> None:
    grammar = form(tokenizer, **fields)
    texts = [written(grammar.copy(), tokenizer, seed) for seed in range(25)]
    assert len(set(texts)) == 25 and None not in texts
    for text in texts:
        check(json.loads(text))


def test_a_checker_of_schemas_agrees(tokenizer: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = {
        "type": "object",
        "properties": {
            "when": {"type": "string", "format": "date"},
            "x": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
            "tree": {"$ref": "#/$defs/tree"},
            "pair": {
                "type": "array",
                "prefixItems": [{"const": 1}, {"type": "string", "maxLength": 2}],
                "items": False,
            },
        },
        "required": ["when", "x", "tree"],
        "additionalProperties": {"type": "boolean"},
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
                "required": ["left"],
                "additionalProperties": False,
            }
        },
    }
    grammar = form(tokenizer, guided_json=schema)
    texts = [written(grammar.copy(), tokenizer, seed) for seed in range(40)]
    whole = [text for text in texts if text is not None]
    assert len(whole) > 20
    for text in whole:
        jsonschema.validate(json.loads(text), schema)


def test_an_object_of_json_is_one(tokenizer: Any) -> None:
    grammar = form(tokenizer, {"type": "json_object"})
    texts = [written(grammar.copy(), tokenizer, seed) for seed in range(40)]
    whole = [text for text in texts if text is not None]
    assert len(set(whole)) > 10
    assert all(isinstance(json.loads(text), dict) for text in whole)


@pytest.mark.parametrize(
    "expression",
    [
        r"[a-z]{3}-\d{2,4}",
        r"(yes|no)?",
        r"^(0x)?[0-9A-F]+(,[0-9A-F]+){0,3}$",
        r"größer|日本{2,3}|🙂",
        r"a/b\.c\"'\\",
        r"(?i)abc[^d-z]",
        r".{3}",
        r"[^\n]\S\D\W",
        r"[\d-][^\d]\w{2}\s+x",
        "",
    ],
)
def test_answers_match_their_expression(tokenizer: Any, expression: str) -> None:
    grammar = form(tokenizer, guided_regex=expression)
    for seed in range(30):
        text = written(grammar.copy(), tokenizer, seed)
        assert text is not None and re.fullmatch(expression, text, re.ASCII), (expression, text)


@pytest.mark.parametrize(
    "choices", [["yes", "no"], ["a", "ab", "abc"], ["", "x"], ['"\\\n', "größer 🙂", "start: /x/"]]
)
def test_masks_are_those_of_brute_force(tokenizer: Any, choices: list[str]) -> None:
    """Each token that continues a choice can come next, each other one cannot, and the end where a choice is whole."""
    wanted = [choice.encode() for choice in choices]
    characters = {word: token for token, word in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))}
    table = {chr(each): bytes([each]) for each in range(256)}
    spelt = dict(zip(["Ġ", "Ċ", "ĉ"], [b" ", b"\n", b"\t"]))
    words = {token: b"".join(spelt.get(c, table.get(c, b"?")) for c in word) for word, token in characters.items()}
    ascii_words = {token: word for token, word in words.items() if token != END and word.isascii() and b"?" not in word}
    grammars = [(b"", form(tokenizer, guided_choice=choices))]
    seen = set()
    while grammars:
        text, grammar = grammars.pop()
        allowed = grammar.allowed(len(tokenizer))
        assert (bool(allowed[END]), text) == (text in wanted, text)
        assert grammar.is_complete() == (text in wanted)
        for token, word in ascii_words.items():
            continues = any(choice.startswith(text + word) for choice in wanted)
            assert (bool(allowed[token]), text, word) == (continues, text, word)
            if continues and text + word not in seen:
                seen.add(text + word)
                copy = grammar.copy()
                copy.accept(token)
                grammars.append((text + word, copy))
    assert {choice for choice in wanted if choice.isascii() and choice} <= seen


def test_choices_are_all_written(tokenizer: Any) -> None:
    choices = ["yes", "no", "", "größer 🙂", '"\\\n']
    for fields in ({"guided_choice": choices}, {"structured_outputs": {"choice": choices}}):
        grammar = form(tokenizer, **fields)
        assert {written(grammar.copy(), tokenizer, seed) for seed in range(60)} == set(choices)


def test_masks_have_the_size_and_the_kind_of_the_logits(tokenizer: Any) -> None:
    grammar = form(tokenizer, guided_choice=["yes"])
    n = len(tokenizer)
    for n_words in (n - 1, n, n + 1, n + 45):
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.zeros(2, n_words, dtype=dtype)[1]
            grammar.mask(logits)
            left = logits.isfinite().nonzero().flatten().tolist()
            assert {tokenizer.decode([each]) for each in left} <= {"y", "ye", "yes"} and left, left


def test_several_end_tokens_and_the_end_itself(tokenizer: Any) -> None:
    grammar = grammar_of(None, {"guided_choice": ["y"]}, tokenizer, len(tokenizer), {END, 7, 999})
    assert grammar is not None
    (token,) = grammar.allowed(len(tokenizer)).nonzero()[0]
    grammar.accept(int(token))
    assert grammar.allowed(len(tokenizer)).nonzero()[0].tolist() == [END, 7]
    grammar.accept(7)
    assert grammar.allowed(len(tokenizer)).nonzero()[0].tolist() == [END, 7]


def test_a_wrong_token_ends_the_answer_with_an_error(tokenizer: Any) -> None:
    grammar = form(tokenizer, guided_choice=["yes"])
    with pytest.raises(ModelError, match="form of the answer"):
        grammar.accept(END)
    with pytest.raises(ModelError, match="form of the answer"):
        grammar.allowed(len(tokenizer))


def test_spaces_of_json_are_limited(tokenizer: Any) -> None:
    """A model that writes nothing but line ends reaches the next token after 64."""
    grammar = form(tokenizer, {"type": "json_object"})
    (line_end,) = tokenizer.encode("\n")
    grammar.accept(*tokenizer.encode("{"))
    n = 0
    while grammar.allowed(len(tokenizer))[line_end]:
        grammar.accept(line_end)
        n += 1
    assert n == 64


FORMATS = [
    (3, "response_format.type"),
    ({}, "response_format.type"),
    ({"type": "structural_tag"}, "response_format.type"),
    ({"type": "json_schema"}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": {"schema": []}}, "response_format.json_schema.schema"),
]


@pytest.mark.parametrize(("value", "param"), FORMATS)
def test_wrong_formats_are_refused(tokenizer: Any, value: Any, param: str) -> None:
    with pytest.raises(RequestRefused) as found:
        form(tokenizer, value)
    assert (found.value.param, found.value.status) == (param, 400)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 3]}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_wrong_fields_are_refused(tokenizer: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as found:
        form(tokenizer, **fields)
    assert (found.value.param, found.value.status) == (param, 400)


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
LIST = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "Unsatisfiable"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ({"type": "string", "minLength": 3, "pattern": "^a$"}, "Unsatisfiable"),
        ({"type": "foo"}, "foo"),
        ({"not": {"type": "string"}}, "Unimplemented"),
        ({"type": "array", "uniqueItems": True}, "Unimplemented"),
        ({"x-guidance": {"lenient": True}, "if": {}}, "Unimplemented"),
        ({"type": "string", "format": "nope"}, "nope"),
        ({"type": "string", "pattern": "("}, "unclosed"),
        ({"$ref": "http://localhost:1/x"}, "does not fetch"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, "requires itself"),
        ({"$defs": {"node": {"anyOf": [NODE, NODE]}}, "$ref": "#/$defs/node"}, "requires itself"),
        ({"$defs": {"node": {"allOf": [NODE]}}, "$ref": "#/$defs/node"}, "requires itself"),
        (LIST, "requires itself"),
        (
            {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 2},
            "requires itself",
        ),
        ({"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(1001)]}, "1001"),
    ],
)
def test_schemas_that_cannot_be_met_are_refused(tokenizer: Any, schema: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestRefused) as found:
        form(tokenizer, guided_json=schema)
    assert (found.value.param, what in found.value.what) == ("guided_json", True), found.value.what


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/node", "$defs": {"node": {**NODE, "required": []}}},
        {"$ref": "#/$defs/node", "$defs": {"node": {"anyOf": [NODE, {"type": "null"}]}}},
        {**LIST, "minItems": 0},
        {"anyOf": [LIST, {"const": 1}]},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
        {"$defs": {"a/b~": {"type": "null"}}, "$ref": "#/$defs/a~1b~0"},
        {
            **NODE,
            "$defs": {
                "node": {"$ref": "#/$defs/1"},
                **{str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1, 50)},
                "50": {},
            },
        },
    ],
)
def test_schemas_that_refer_to_themselves_can_be_met(tokenizer: Any, schema: dict[str, Any]) -> None:
    form(tokenizer, guided_json=schema)


def test_deep_schemas_are_refused(tokenizer: Any) -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    with pytest.raises(RequestRefused):
        form(tokenizer, guided_json=schema)


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreference"),
        (r"\bfoo", "lookaround"),
        ("a(", "unclosed"),
        (r"[^\s\S]", "no text has it"),
        (r"a[^\s\S]b", "no text has it"),
    ],
)
def test_expressions_that_are_not_understood_are_refused(tokenizer: Any, expression: str, what: str) -> None:
    with pytest.raises(RequestRefused) as found:
        form(tokenizer, guided_regex=expression)
    assert (found.value.param, what in found.value.what) == ("guided_regex", True), found.value.what


def test_text_has_no_form(tokenizer: Any) -> None:
    assert grammar_of(None, {}, tokenizer, 300, {END}) is None
    assert grammar_of({"type": "text"}, {"guided_json": None}, tokenizer, 300, {END}) is None
    assert grammar_of_tools(TOOLS, "auto", HermesToolParser, tokenizer, 300, {END}) is None
    assert grammar_of_tools(None, "none", None, tokenizer, 300, {END}) is None


def test_a_form_needs_a_fast_tokenizer_an_end_and_the_package(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __len__(self) -> int:
            return 5

    for words, ends in ((Slow(), {END}), (tokenizer, set()), (tokenizer, {300})):
        with pytest.raises(RequestRefused, match="fast, and end tokens") as found:
            grammar_of(None, {"guided_regex": "a"}, words, len(words), ends)
        assert found.value.param == "guided_regex"
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestRefused, match=r'pip install "deepspeed-c\[structured\]"'):
        form(tokenizer, guided_regex="a")


@pytest.mark.parametrize("parser", [HermesToolParser, Llama3ToolParser, MistralToolParser])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_an_answer_that_must_call_a_tool_does(tokenizer: Any, parser: type, is_parallel: bool) -> None:
    def calls(choice: Any, seed: int) -> list[Any]:
        grammar = grammar_of_tools(TOOLS, choice, parser, tokenizer, len(tokenizer), {END}, is_parallel=is_parallel)
        assert grammar is not None
        text = written(grammar, tokenizer, seed, 3000)
        assert text is not None
        reader = parser()
        pieces = reader.add(text) + reader.finish()
        assert pieces and all(piece.index is not None for piece in pieces), text
        return pieces

    found = [calls("required", seed) for seed in range(16)]
    named = [calls({"type": "function", "function": {"name": "look"}}, seed) for seed in range(4)]
    assert {piece.name for pieces in found for piece in pieces} == {"look", 'say "ü"'}
    assert {piece.name for pieces in named for piece in pieces} == {"look"}
    for pieces in found + named:
        for piece in pieces:
            arguments = json.loads(piece.arguments)
            check(arguments) if piece.name == "look" else None
            assert piece.name == "look" or arguments == {}
    # Llama's templates take one call of a message.
    has_several = is_parallel and parser is not Llama3ToolParser
    assert (max(map(len, found)) > 1) == has_several


def test_schemas_of_tools_are_checked(tokenizer: Any) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["a"]}
    for schema in (bad, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        with pytest.raises(RequestRefused) as found:
            grammar_of_tools(tools, "required", HermesToolParser, tokenizer, 300, {END})
        assert found.value.param.startswith("tools")


def test_a_special_token_is_one_token(tokenizer: Any) -> None:
    words = byte_tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    token = words.convert_tokens_to_ids("[TOOL_CALLS]")
    grammar = grammar_of_tools(TOOLS, "required", MistralToolParser, words, len(words), {END})
    assert grammar is not None
    assert grammar.allowed(len(words)).nonzero()[0].tolist() == [token]


def test_a_model_writes_the_form_beside_free_answers(folder: str, tokenizer: Any) -> None:
    """Through the loop of requests: answers with a form among others, which stay as they are alone."""
    memory = {"mode": "allocate", "size": 150}
    manager = {"max_context": 400, "max_ragged_batch_size": 64, "max_ragged_sequence_count": 16}
    config = RaggedInferenceEngineConfig(state_manager={**manager, "memory_config": memory})
    loop = RequestLoop(build_hf_engine(folder, config), tokenizer.decode, len(tokenizer))
    grammar = form(tokenizer, guided_json=SCHEMA)
    prompt = tokenizer.encode("def main(self): ")

    def ask(seed: int, grammar: TokenGrammar | None) -> list[Any]:
        events: list[Any] = []
        rules = Rules(temperature=1.7)
        params = SamplingParams(n_new=220, rules=rules, seed=seed, ends=frozenset({END}), grammar=grammar)
        loop.submit(loop.check(prompt, params), events.append)
        return events

    try:
        formed = [ask(seed, grammar.copy()) for seed in range(5)]
        free = ask(3, None)
        loop.run_until(lambda: loop.n_requests == 0 and formed[-1] != [])
        alone = ask(3, None)
        loop.run_until(lambda: alone != [] and alone[-1].reason is not None)
    finally:
        loop._engine.destroy()
        dist.destroy_process_group()
    assert [event.token for event in free] == [event.token for event in alone]
    reasons = [events[-1].reason for events in formed]
    assert all(events[-1].error is None for events in formed), formed
    assert reasons.count(FinishReason.STOP) >= 2, reasons
    for events in formed:
        if events[-1].reason is FinishReason.STOP:
            check(json.loads("".join(event.text for event in events)))
