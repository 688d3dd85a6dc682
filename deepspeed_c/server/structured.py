"""Structured output: JSON, a regular expression, a choice of texts, a call of a tool.

llguidance says which tokens can come next, and the end tokens of the model are among them only where the text is whole.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepspeed_c.errors import ModelError
from deepspeed_c.server.errors import RequestRefused
from deepspeed_c.server.tools import ToolParser, chosen_functions

__all__ = ["TokenGrammar", "grammar_of", "grammar_of_tools", "make_tables"]

_SHOWN_CHARACTERS = 300
# Models that lose their way write spaces without end where JSON allows it. So many are enough for lines and their
# indentation.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}", "lenient": False}
_FORMS = ("json", "regex", "choice")
# Each of them may be looked at once for each other one.
_MOST_REFERENCES = 1000


class TokenGrammar:
    """The form of one answer, as ``serving.sampling.Grammar`` describes it.

    Args:
        matcher: llguidance's LLMatcher, without tokens.
        n_words: of its tokenizer.
    """

    def __init__(self, matcher: Any, n_words: int) -> None:
        self._matcher, self._n_words = matcher, n_words
        self._bits = np.empty((1, -(-n_words // 32)), np.int32)

    def copy(self) -> TokenGrammar:
        """The same form, for another answer; this one has begun no answer."""
        return TokenGrammar(self._matcher.deep_copy(), self._n_words)

    def mask(self, logits: torch.Tensor) -> None:
        """Sets the logits, float [words], of all tokens that cannot come next to -inf. Raises ModelError for a form
        that is too much work."""
        allowed = torch.from_numpy(self.allowed(len(logits)))
        logits.masked_fill_(~allowed.to(logits.device), -torch.inf)

    def allowed(self, n_words: int) -> np.ndarray:
        """Whether each of the first ``n_words`` tokens can come next: bool [n_words]. Raises ModelError."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise self._error()
        return np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little", count=n_words).view(bool)

    def accept(self, token: int) -> None:
        """Takes a token that was chosen; end tokens too. Raises ModelError if the token cannot come next."""
        if not self._matcher.consume_token(token):
            raise self._error()

    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def _error(self) -> ModelError:
        return ModelError(
            f"the form of the answer cannot be followed: {_short(self._matcher.get_error())}",
            where="structured output",
            fix="simplify the schema or the expression",
        )


def grammar_of(
    response_format: Any,
    structured: Mapping[str, Any],
    tokenizer: Any,
    n_words: int,
    ends: Iterable[int],
) -> TokenGrammar | None:
    """The form that a request asks for. None: any text.

    Args:
        response_format: OpenAI's field, or None.
        structured: vLLM's fields that the request has: structured_outputs, guided_json, guided_regex, guided_choice.
        tokenizer: of transformers.
        n_words: of the model's logits.
        ends: the model's end tokens.

    Raises RequestRefused with the name of the field if the form is malformed, unknown to llguidance or impossible, if
    the tokenizer is not fast, and if llguidance is not installed.
    """
    found = [*_forms_of(response_format, structured)]
    if len(found) > 1:
        raise RequestRefused(
            f"{found[0][0]} and {found[1][0]} both give a form", param=found[1][0], fix="leave one of the two out"
        )
    if not found:
        return None
    (param, form, value) = found[0]
    return _compile(_source(param, form, value), param, tokenizer, n_words, ends)


def grammar_of_tools(
    tools: Sequence[Any] | None,
    tool_choice: Any,
    parser: type[ToolParser] | None,
    tokenizer: Any,
    n_words: int,
    ends: Iterable[int],
    *,
    is_parallel: bool = True,
) -> TokenGrammar | None:
    """The form of an answer that must call a tool, in the template's own form. None: the model chooses.

    Args:
        parser: of ``parser_of``. None will do where ``tool_choice`` is "none" or "auto".
        is_parallel: whether one answer may have several calls.

    Raises RequestRefused as ``chosen_functions`` and ``grammar_of``.
    """
    functions = chosen_functions(tools, tool_choice)
    if functions is None or parser is None:
        return None
    for i, each in enumerate(functions):
        _check_finite(each.parameters, f"tools[{i}].function.parameters")
    limited = [each._replace(parameters={**each.parameters, "x-guidance": _JSON_OPTIONS}) for each in functions]
    source = parser.lark(limited, tokenizer, is_parallel=is_parallel)
    return _compile(_package("tools").LLMatcher.grammar_from_lark(source), "tools", tokenizer, n_words, ends)


def make_tables(tokenizer: Any, n_words: int, ends: Iterable[int]) -> bool:
    """Makes llguidance's tables of a tokenizer, which the first form of a process would wait for. Returns whether
    answers can be given a form: llguidance is installed, and the tokenizer is fast and has an end.

    Arguments: as of ``grammar_of``.
    """
    try:
        _words(tokenizer, n_words, frozenset(ends))
    except (ImportError, ValueError):
        return False
    return True


def _forms_of(response_format: Any, structured: Mapping[str, Any]) -> Iterable[tuple[str, str, Any]]:
    """(path of the field, form, value) of each field that gives a form."""
    if response_format is not None:
        kind = response_format.get("type") if isinstance(response_format, dict) else None
        if kind == "json_object":
            yield "response_format", "json", {"type": "object"}
        elif kind == "json_schema":
            inner = response_format.get("json_schema")
            if not isinstance(inner, dict) or inner.get("schema") is None:
                raise RequestRefused(
                    "there is no schema",
                    param="response_format.json_schema",
                    fix='write {"name": ..., "schema": {...}}',
                )
            yield "response_format.json_schema.schema", "json", inner["schema"]
        elif kind != "text":
            raise RequestRefused(
                f"the type {_shown(kind)} is unknown",
                param="response_format.type",
                fix='write "text", "json_object" or "json_schema"',
            )
    for name, value in structured.items():
        if value is None:
            continue
        if name != "structured_outputs":
            yield name, name.removeprefix("guided_"), value
            continue
        if not isinstance(value, dict):
            raise RequestRefused(
                f"{_shown(value)} is no object", param=name, fix=f"write one of {', '.join(_FORMS)} in it"
            )
        for form, inner in value.items():
            if inner is None:
                continue
            if form not in _FORMS:
                raise RequestRefused(
                    f"the form {_shown(form)} is unknown",
                    param=f"{name}.{form}",
                    fix=f"write one of {', '.join(_FORMS)}",
                )
            yield f"{name}.{form}", form, inner


def _source(param: str, form: str, value: Any) -> str:
    """The grammar of llguidance."""
    matcher = _package(param).LLMatcher
    if form == "json":
        schema = _schema(value, param)
        _check_finite(schema, param)
        return matcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": _JSON_OPTIONS}))
    if form == "regex":
        if not isinstance(value, str):
            raise RequestRefused(f"{_shown(value)} is no text", param=param, fix="write a regular expression")
        # \d, \w and \s mean ASCII, because tables of Unicode differ between versions: a client's own check could refuse
        # a rare digit.
        return matcher.grammar_from_regex(_package(param).regex_to_lark(value, "dws"))
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise RequestRefused(f"{_shown(value)} is no list of texts", param=param, fix="write one text at least")
    return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))


def _schema(value: Any, param: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestRefused(
                f"the schema is no JSON: {error}", param=param, fix="write an object of JSON"
            ) from error
    if not isinstance(value, dict):
        raise RequestRefused(f"{_shown(value)} is no JSON schema", param=param, fix="write an object")
    return value


def _package(param: str) -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestRefused(
            "this server has no llguidance, so answers have no form",
            param=param,
            fix='install it where the server runs: pip install "deepspeed-c[structured]"',
        ) from error
    return llguidance


def _compile(source: str, param: str, tokenizer: Any, n_words: int, ends: Iterable[int]) -> TokenGrammar:
    llguidance = _package(param)
    try:
        words = _words(tokenizer, n_words, frozenset(ends))
    except ValueError as error:
        raise RequestRefused(
            f"answers of a form need a tokenizer that is fast, and end tokens: {_short(str(error))}",
            param=param,
            fix="leave the field out, or serve a model with a tokenizer.json",
        ) from error
    matcher = llguidance.LLMatcher(words, source, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        raise _refused(matcher.get_error(), param)
    found = TokenGrammar(matcher, words.vocab_size)
    try:
        can_begin = found.copy().allowed(n_words).any()
    except ModelError as error:
        raise _refused("no text has it" if "NoExtension" in error.what else error.what, param) from error
    if not can_begin:
        raise _refused("no word of the model begins it", param)
    return found


@functools.lru_cache(maxsize=4)
def _words(tokenizer: Any, n_words: int, ends: frozenset[int]) -> Any:
    """The tokenizer for llguidance; building it takes about a second for 100,000 words. Raises ValueError if the
    tokenizer is not fast, and if none of ``ends`` is among its words."""
    import llguidance.hf

    n_all = max(n_words, len(tokenizer))
    known = sorted(each for each in ends if 0 <= each < n_words)
    if not known:
        raise ValueError("the model has no end token")
    return llguidance.hf.from_tokenizer(tokenizer, n_vocab=n_all, eos_token=known)


def _refused(text: str, param: str) -> RequestRefused:
    return RequestRefused(
        f"no answer can be given this form: {_short(text)}",
        param=param,
        fix="change the schema or the expression (docs/serving.md has the parts that are understood)",
    )


def _check_finite(schema: dict[str, Any], param: str) -> None:
    """Raises RequestRefused if only endless text meets the schema, because it requires itself."""
    try:
        targets = {each: _target(schema, each) for each in _references(schema)}
        if len(targets) > _MOST_REFERENCES:
            raise RequestRefused(
                f"the schema refers to {len(targets)} parts, and {_MOST_REFERENCES} are the most",
                param=param,
                fix="write fewer definitions",
            )
        finite: set[str] = set()
        while new := {each for each in targets.keys() - finite if _is_finite(targets[each], finite)}:
            finite |= new
        is_finite = _is_finite(schema, finite)
    except RecursionError as error:
        raise RequestRefused("the schema is too deep", param=param, fix="write fewer levels") from error
    if not is_finite:
        raise RequestRefused(
            "the schema requires itself, so no text meets it", param=param, fix="make one property optional"
        )


def _references(schema: Any) -> Iterable[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """Whether finite text may meet a schema whose references to ``finite`` can be met, and to others cannot. Parts that
    llguidance refuses count as finite."""
    if not isinstance(schema, dict):
        return True
    if isinstance(schema.get("$ref"), str) and schema["$ref"] not in finite:
        return False
    parts: list[Any] = []
    if isinstance(schema.get("allOf"), list):
        parts += schema["allOf"]
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list) and _is_only(schema, "object"):
        parts += [properties[name] for name in required if isinstance(name, str) and name in properties]
    n_least = schema.get("minItems")
    if isinstance(n_least, int) and n_least > 0 and _is_only(schema, "array"):
        prefix = schema.get("prefixItems")
        prefix = prefix if isinstance(prefix, list) else []
        parts += prefix[:n_least] if n_least <= len(prefix) else [*prefix, schema.get("items")]
    if not all(_is_finite(each, finite) for each in parts):
        return False
    return all(
        any(_is_finite(each, finite) for each in schema[name])
        for name in ("anyOf", "oneOf")
        if isinstance(schema.get(name), list) and schema[name]
    )


def _is_only(schema: Mapping[str, Any], kind: str) -> bool:
    """Whether values of a schema are of one type alone."""
    return schema.get("type") in (kind, [kind])


def _target(root: dict[str, Any], reference: str) -> Any:
    """The part of a schema that a reference names; None if there is none."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
