"""Random requests to a server: any answer is good that has a status below 500 and, for an error, its object.

python -m tests.deepspeed_c.server.fuzz --requests 10000 --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

from tests.deepspeed_c.server import running

GOOD = {"model": "tiny", "prompt": "def main(self, value): ", "max_tokens": 9, "temperature": 0}
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/embeddings", "/v1/nothing")
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"enum": [1, 2]}}},
    {"type": "nothing"},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#/definitions/a"},
    {"$ref": "#"},
    {"type": "string", "pattern": "("},
    {"minimum": 5, "maximum": 1, "type": "integer"},
    {"type": "array", "minItems": 10**9},
    True,
)
FIELDS: dict[str, tuple[Any, ...]] = {
    "model": ("tiny", "other", ""),
    "prompt": (
        "a",
        "",
        ["a", "b"],
        [1, 2],
        [[1], [2, 3]],
        [1, "a"],
        [[]],
        [10**9],
        [-1],
        "\ud83d\ude42 größer\0",
        ["a"] * 40,
    ),
    "messages": (
        [{"role": "user", "content": "a"}],
        [{"role": "judge", "content": "a"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": [{"type": "input_audio"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}],
        [{"role": "tool", "content": "a", "tool_call_id": 5}],
        [{}],
        [[]],
        [{"role": "user", "content": "a", "name": {"b": []}}],
    ),
    "max_tokens": (1, 7, 0, -1, 10**6, 10**30, 1.5, "3"),
    "max_completion_tokens": (1, 7, 0, 10**6),
    "n": (1, 2, 3, 0, 17, 10**20),
    "temperature": (0, 1, 2, 1e-300, 5e-324, 2.1, -1, "hot"),
    "top_p": (1, 0.5, 1e-300, 0, 1.1),
    "top_k": (-1, 0, 1, 5, 10**6, -2, 2**31),
    "min_p": (0, 0.3, 1, 1.1),
    "repetition_penalty": (1, 0.01, 100, 0, -1, 1e300),
    "presence_penalty": (2, -2, 3),
    "frequency_penalty": (2, -2, -3),
    "logit_bias": (
        {},
        {"5": 100},
        {"5": -100, "0": 3.5},
        {"-1": 1},
        {"5": 1e9},
        {"999999": 1},
        {"a": 1},
        {"²": 1},
        {"5": "b"},
        [],
    ),
    "seed": (0, -1, 2**63, 2**64, 1.5),
    "stop": ("a", ["a", "e"], "", [""], ["a"] * 30, [5], "x" * 5000),
    "stop_token_ids": ([5], [], [10**6], [-1], [True], ["a"]),
    "ignore_eos": (True, False, 1),
    "min_tokens": (0, 3, 10**9, -1),
    "echo": (True, False, "yes"),
    "logprobs": (0, 3, True, False, 21, -1),
    "top_logprobs": (0, 3, 21),
    "stream": (True, False, 1),
    "stream_options": ({"include_usage": True}, {"include_usage": 5}, {"other": 1}, []),
    "cache_salt": ("a", "", 5),
    "tools": ([TOOL], [TOOL, TOOL], [], [{}], [5], "a"),
    "tool_choice": ("auto", "none", "required", "other", {"type": "function", "function": {"name": "clock"}}, {}, 5),
    "parallel_tool_calls": (True, False, 0),
    "response_format": (
        {"type": "text"},
        {"type": "json_object"},
        {"type": "xml"},
        {},
        *({"type": "json_schema", "json_schema": {"name": "a", "schema": each}} for each in SCHEMAS),
    ),
    "guided_json": SCHEMAS,
    "guided_regex": ("[ab]{3}", "(", "a{1000000}", "(?=a)", "", 5),
    "guided_choice": (["a", "b"], [], [5], ["\n"]),
    "structured_outputs": ({"regex": "a"}, {"other": 1}, {"json": {}, "regex": "a"}, {}),
    "chat_template_kwargs": ({}, {"a": [1]}, {"tokenize": True}, {"messages": 5}),
    "add_generation_prompt": (True, False),
    "continue_final_message": (True, False),
    "add_special_tokens": (True, False, 3),
    "return_token_strs": (True, False),
    "tokens": ([1, 2], [], [10**6], ["a"], "a"),
    "best_of": (1, 2),
    "user": ("a", 5),
    "audio": ({},),
    "unknown": (1,),
    "": (1,),
}
ANY: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    "",
    "a",
    [],
    {},
    [None],
    {"a": {"b": []}},
    2**70,
    "\0",
    "x" * 300,
)
RAW = (
    b"", b"{", b"null", b"[]", b"5", b'"a"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"temperature": NaN}',
    b'{"temperature": 1e999}', b'{"prompt": "a", "max_tokens": ' + b"1" * 5000 + b"}", b"[" * 100000, b'{"a":' * 50000, b"\0" * 99,
    b'{"prompt": "a", "prompt": 5}',
)  # fmt: skip


def requests_of(seed: int, n: int) -> Iterable[tuple[str, bytes]]:
    """(path, body): bodies with most fields right and some wrong, and bytes that are no JSON."""
    choose = random.Random(seed)
    for _ in range(n):
        path = choose.choices(PATHS, (6, 6, 1, 1, 0.2, 0.2))[0]
        if choose.random() < 0.05:
            yield path, choose.choice(RAW)
            continue
        body: dict[str, Any] = {"max_tokens": 5}
        body["messages" if "chat" in path else "prompt"] = FIELDS["messages"][0] if "chat" in path else "a"
        for name in choose.sample([*FIELDS], choose.choice((1, 1, 2, 3, 5))):
            # The first values of a field are right.
            values = FIELDS[name] if choose.random() < 0.6 else FIELDS[name][:2]
            body[name] = choose.choice(ANY) if choose.random() < 0.1 else choose.choice(values)
        if choose.random() < 0.02:
            body[choose.choice(["prompt", "messages"])] = "a" * choose.choice((3000, 200_000))
        data = json.dumps(body).encode()
        if choose.random() < 0.02:
            place = choose.randrange(len(data))
            data = data[:place] + bytes([choose.randrange(256)]) + data[place + 1 :]
        yield path, data


def problem(path: str, body: bytes, answer: httpx.Response) -> str:
    """What is wrong about an answer; "" if nothing is."""
    shown = f"{path} {body[:400]!r}: {answer.status_code} {answer.text[:400]}"
    if answer.status_code >= 500:
        return shown
    if answer.headers["content-type"].startswith("text/event-stream"):
        *_, last = answer.text.strip().split("\n\n")
        error = json.loads(last[6:]).get("error") if last != "data: [DONE]" else None
        return "" if last == "data: [DONE]" or is_of_the_form(error) else shown
    found = answer.json()
    if answer.status_code == 200:
        return ""
    error = found.get("error", {})
    return "" if isinstance(error.get("message"), str) and error["message"] and error["type"] else shown


def is_of_the_form(error: Any) -> bool:
    """Whether an answer failed because its form and its other fields leave no token."""
    return isinstance(error, dict) and (
        "form of the answer" in error["message"] or "no token can be" in error["message"]
    )


def run(url: str, seed: int, n: int) -> tuple[Counter[int], list[str]]:
    """(number of answers with each status, problems). Each hundredth request is a good one, whose answer stays."""
    counts: Counter[int] = Counter()
    problems: list[str] = []
    with httpx.Client(base_url=url, timeout=120) as client:
        good = client.post("/v1/completions", json=GOOD).json()["choices"]
        for i, (path, body) in enumerate(requests_of(seed, n)):
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
            counts[answer.status_code] += 1
            if what := problem(path, body, answer):
                problems.append(what)
            if i % 100 == 99 and (now := client.post("/v1/completions", json=GOOD).json()["choices"]) != good:
                problems.append(f"after request {i} the good answer is {now}, and was {good}")
    return counts, problems


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running.served(running.chat_folder(Path(folder))) as server:
        counts, problems = run(server.url, options.seed, options.requests)
        print(dict(counts), server.model.counts, f"{len(problems)} problem(s)", *problems[:20], sep="\n")


if __name__ == "__main__":
    main()
