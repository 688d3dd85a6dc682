"""What does `deepspeed_c serve` add to a token, how long do tokens wait beside a long prompt, and how much does it answer?

Token: answers of 200 tokens, one after another, by a server with a small Llama and by an engine with the same model in
this process, which only gets `put` and argmax. The difference is HTTP, the event stream, text, schedule and choice.
Long prompt: three answers run on a Llama of 350M parameters in bf16 when a prompt of 2000 tokens comes. The gaps between
their tokens until its first token are compared with each other: p99 over p50.
Load: 40 requests at 2 a second (seeded Poisson arrivals, prompts of 32 to 128 tokens, answers of 16 to 64) to the same
server, and to vLLM's where DSC_VLLM_PYTHON names the interpreter of its environment; both take turns.
All servers have a process of their own; the client is that of `deepspeed_c bench inference`. A word of the tokenizer is
one token, so that each token is a piece of the stream.
Run: python -m benchmarks.hf.serve [--rounds 3] [--layers 16] [--width 1152]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.hf.generate import VOCAB, make_model
from benchmarks.hf.serving import settings
from benchmarks.hf.vllm_cpu import SETTINGS
from benchmarks.measure import in_turn, machine, median_spread, ratios, require
from deepspeed_c import _C
from deepspeed_c.bench.http_stream import Address
from deepspeed_c.bench.inference import RequestOutcome, ServerTarget, ask_all
from deepspeed_c.bench.load import Lengths, Load
from deepspeed_c.bench.server import is_ready, served
from deepspeed_c.bench.summary import percentile, summary_of
from deepspeed_c.config.ragged import RaggedInferenceEngineConfig
from deepspeed_c.inference.v2 import build_hf_engine
from deepspeed_c.listening import listening_socket

TINY_LAYERS, TINY_WIDTH = 1, 64
ANSWER, BESIDE, LONG = 200, 3, 2000
LOAD = {"rate": 2.0, "prompt_tokens": Lengths(32, 128), "new_tokens": Lengths(16, 64)}
OURS, VLLM = "deepspeed_c", "vLLM"
NAME = "model"
READY_LIMIT_S = 300.0


def write_folder(folder: str, layers: int, width: int) -> int:
    """A Llama in bf16, and a tokenizer with a word for each token. Returns the number of parameters."""
    import tokenizers
    import transformers

    model = make_model(layers, width).bfloat16()
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return sum(param.numel() for param in model.parameters())


def load_of(seed: int, n: int, **fields: Any) -> Load:
    return Load(**{**LOAD, "n_requests": n, "seed": seed, "n_words": VOCAB, **fields})


def ask(address: Address, load: Load) -> list[RequestOutcome]:
    found = asyncio.run(ask_all(load, ServerTarget(address, NAME), report=lambda _: None)).outcomes
    failed = [each.message for each in found if each.error]
    require(not failed, f"all requests are answered: {failed[:3]}")
    return found


def one_answer(address: Address, seed: int) -> float:
    """Seconds of a token behind the first one."""
    (found,) = ask(
        address, load_of(seed, 1, rate=float("inf"), prompt_tokens=Lengths(32, 32), new_tokens=Lengths(ANSWER, ANSWER))
    )
    require(
        len(found.piece_s) == found.n_new == ANSWER, f"each token is a piece: {len(found.piece_s)} of {found.n_new}"
    )
    return (found.piece_s[-1] - found.piece_s[0]) / (ANSWER - 1)


def one_answer_of_engine(engine: Any, seed: int) -> float:
    prompt = torch.randint(0, VOCAB, (32,), generator=torch.Generator().manual_seed(seed))
    word = engine.put([0], [prompt]).argmax(-1)
    begin = time.perf_counter()
    for _ in range(ANSWER - 1):
        word = engine.put([0], [word]).argmax(-1)
    seconds = (time.perf_counter() - begin) / (ANSWER - 1)
    engine.flush(0)
    return seconds


def compare_token(n_answers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_folder(folder, TINY_LAYERS, TINY_WIDTH)
        with served(folder, ["--served-model-name", NAME]) as address:
            engine = build_hf_engine(folder, RaggedInferenceEngineConfig(**settings()))
            added: list[float] = []
            for round_ in range(n_answers + 1):
                times = {}
                for name in in_turn([OURS, "engine"], round_):
                    times[name] = one_answer(address, round_) if name == OURS else one_answer_of_engine(engine, round_)
                added += [(times[OURS] - times["engine"]) * 1e3] if round_ else []
            engine.destroy()
    middle, least, most = median_spread(added)
    print(
        json.dumps(
            {
                "benchmark": "serve",
                "machine": machine(),
                "contender": "token",
                "ms_added": round(middle, 4),
                "ms_added_min": round(least, 4),
                "ms_added_max": round(most, 4),
            }
        ),
        flush=True,
    )


async def gaps_beside(address: Address, seed: int, ahead_s: float, n_tokens: int) -> list[float]:
    """Seconds between tokens of running answers while a long prompt is read."""
    target = ServerTarget(address, NAME)
    lengths = {"prompt_tokens": Lengths(16, 16), "new_tokens": Lengths(n_tokens, n_tokens)}
    running = load_of(seed, BESIDE, rate=float("inf"), **lengths)
    long = load_of(seed + 1, 1, rate=float("inf"), prompt_tokens=Lengths(LONG, LONG), new_tokens=Lengths(1, 1))
    begin = time.perf_counter()
    beside = asyncio.create_task(ask_all(running, target, report=lambda _: None))
    await asyncio.sleep(ahead_s)
    offset = time.perf_counter() - begin
    (found,) = (await ask_all(long, target, report=lambda _: None)).outcomes
    answers = (await beside).outcomes
    first, last = offset + found.sent_s, offset + found.piece_s[0]
    require(all(each.piece_s[-1] > last for each in answers), "the answers outlast the prompt")
    return [
        b - a
        for each in answers
        for a, b in zip(each.piece_s, each.piece_s[1:], strict=False)
        if b > first and a < last
    ]


def print_gaps(address: Address, options: argparse.Namespace, common: dict[str, Any]) -> None:
    shares, middles = [], []
    for round_ in range(options.rounds):
        gaps = sorted(asyncio.run(gaps_beside(address, 100 + 2 * round_, options.ahead_s, options.beside_tokens)))
        middles.append(percentile(gaps, 50))
        shares.append(percentile(gaps, 99) / middles[-1])
    middle, least, most = median_spread(shares)
    line = {
        **common,
        "contender": "long prompt",
        "prompt": LONG,
        "ms_p50": round(median_spread(middles)[0] * 1e3, 1),
        "p99_over_p50": round(middle, 3),
        "p99_over_p50_min": round(least, 3),
        "p99_over_p50_max": round(most, 3),
    }
    print(json.dumps(line), flush=True)


@contextlib.contextmanager
def served_by_vllm(python: str, folder: str) -> Iterator[Address]:
    with listening_socket("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    words = ["--port", str(port), "--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", "2048"]
    words += ["--served-model-name", NAME, "--enforce-eager", "--no-enable-prefix-caching", "--max-num-seqs", "64"]
    runtime = Path(python).parents[1] / "lib" / "libiomp5.so"
    environment = {**os.environ, **SETTINGS, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    if runtime.exists():
        environment["LD_PRELOAD"] = str(runtime)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *words]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = Address(False, "127.0.0.1", port, "")
        require(asyncio.run(is_ready(address, server, "/health", READY_LIMIT_S)), "vLLM's server is ready")
        yield address
    finally:
        server.terminate()
        server.wait()


def compare_load(options: argparse.Namespace) -> None:
    python = os.environ.get("DSC_VLLM_PYTHON")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        n_params = write_folder(folder, options.layers, options.width)
        common = {
            "benchmark": "serve",
            "params": n_params,
            "threads": torch.get_num_threads(),
            "machine": machine(),
        }
        words = ["--served-model-name", NAME, "--max-model-len", "2048", "--no-enable-prefix-caching"]
        addresses = {OURS: servers.enter_context(served(folder, words))}
        print_gaps(addresses[OURS], options, common)
        if python:
            addresses[VLLM] = servers.enter_context(served_by_vllm(python, folder))
        else:
            print("no vLLM: DSC_VLLM_PYTHON names no Python that has it", file=sys.stderr)
        found: dict[str, list[Any]] = {name: [] for name in addresses}
        for round_ in range(options.rounds):
            for name in in_turn(list(addresses), round_):
                outcomes = ask(addresses[name], load_of(round_, options.requests))
                found[name].append(summary_of(outcomes, 0.0, is_text=False))
        for name, each in found.items():
            require(all(summary.n_short == 0 for summary in each), f"{name} gives all tokens")
            line = {
                **common,
                "contender": name,
                "requests": options.requests,
                "tokens_per_s": round(median_spread([summary.tokens_per_s for summary in each])[0], 2),
                "first_token_p50_s": round(median_spread([summary.first_token_s.p50 for summary in each])[0], 3),
                "token_p50_ms": round(median_spread([summary.between_tokens_s.p50 for summary in each])[0] * 1e3, 1),
                "token_p99_ms": round(median_spread([summary.between_tokens_s.p99 for summary in each])[0] * 1e3, 1),
            }
            if name == OURS and VLLM in found:
                theirs = [summary.tokens_per_s for summary in found[VLLM]]
                line |= ratios("ratio_to_vllm", [summary.tokens_per_s for summary in each], theirs)
            print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1152)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--answers", type=int, default=30, help="by which the cost of a token is measured")
    parser.add_argument("--ahead_s", type=float, default=2.0, help="time of the answers before the long prompt")
    parser.add_argument("--beside_tokens", type=int, default=ANSWER, help="of the answers beside the long prompt")
    options = parser.parse_args()
    torch.set_num_threads(_C.pool_n_threads())
    compare_token(options.answers)
    compare_load(options)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
