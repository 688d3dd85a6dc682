"""How long does the ragged engine take for 16 sequences, against one after another and against others' continuous batching?

A Llama of 350M parameters in bf16, on all processors of one process, greedy; 16 prompts of 24 to 40 tokens and 32 more
each. Together: one ``put`` of all prompts, then one ``put`` a token. "one after another" puts the sequences of the same
engine singly. "deterministic" puts them together in an engine whose bits do not depend on company. ``generate_batch``
of transformers runs the same prompts, and so does vLLM where DSC_VLLM_PYTHON names the interpreter of its environment
(benchmarks/hf/vllm_cpu.py). Logits of the last tokens have to be as near to fp32 as transformers' in bf16. A
prompt of 512 tokens comes in one piece and in four, and 512 tokens of 520 are found. All other prompts have salts of
their own, so that nothing is found.
Run: python -m benchmarks.hf.ragged [--rounds 3] [--layers 16] [--width 1152]
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepspeed_c
from benchmarks.hf.generate import VOCAB, make_model
from benchmarks.measure import in_turn, machine, median_spread, ratios, require
from benchmarks.served import Served
from deepspeed_c import _C
from deepspeed_c.inference.v2 import InferenceEngineV2, RaggedInferenceEngineConfig

SEQUENCES, NEW, PROMPT, PIECES = 16, 32, 512, 4
WARMUP = 1
BEHIND = 8  # tokens behind the found ones
TOGETHER, APART, THEIRS, VLLM = "together", "one after another", "transformers", "vLLM"
ROOT = Path(__file__).resolve().parents[2]
_salts = map(str, itertools.count())


def run(engine: InferenceEngineV2, prompts: list[torch.Tensor], n_new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(new tokens [sequences, n_new], logits of the last ones), all sequences together."""
    uids, tokens, found = list(range(len(prompts))), prompts, []
    salts = dict.fromkeys(uids, next(_salts))
    for _ in range(n_new):
        logits = engine.put(uids, tokens, salts=salts)
        tokens = list(logits.argmax(-1, keepdim=True))
        found.append(torch.cat(tokens))
    for uid in uids:
        engine.flush(uid)
    return torch.stack(found, 1), logits


def put_pieces(engine: InferenceEngineV2, prompt: torch.Tensor, n_pieces: int) -> torch.Tensor:
    salts = {0: next(_salts)}
    for piece in prompt.chunk(n_pieces):
        logits = engine.put([0], [piece], salts=salts)
    engine.flush(0)
    return logits


def put_found(engine: InferenceEngineV2, prompt: torch.Tensor) -> float:
    """The seconds of a prompt whose first tokens an earlier sequence without a salt has left. That sequence is computed
    here: other contenders may have taken the blocks of the one before."""
    for _ in range(2):
        begin = time.perf_counter()
        n_found = engine.count_found(prompt)
        engine.put([0], [prompt])
        engine.flush(0)
        seconds = time.perf_counter() - begin
    require(n_found == PROMPT, f"{n_found} of {len(prompt)} tokens are found")
    return seconds


class Vllm:
    """The process of vLLM that `benchmarks.hf.vllm_cpu` is."""

    def __init__(self, python: str, model: Any, folder: str) -> None:
        model.save_pretrained(folder)
        threads = str(torch.get_num_threads())
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads}
        runtime = Path(python).parents[1] / "lib" / "libiomp5.so"
        if runtime.exists():  # vLLM asks for it
            environment["LD_PRELOAD"] = str(runtime)
        self._served = Served([python, "-m", "benchmarks.hf.vllm_cpu", folder], environment)
        self.version = self._served.answer()["version"]

    def ask(self, prompts: list[torch.Tensor], n_new: int) -> dict[str, Any]:
        self._served.ask(json.dumps({"prompts": [each.tolist() for each in prompts], "n_new": n_new}))
        return self._served.answer()

    def close(self) -> None:
        self._served.close()


def continuous(model: Any, prompts: list[torch.Tensor], n_new: int) -> Any:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=n_new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return model.generate_batch([each.tolist() for each in prompts], generation_config=config, progress_bar=False)


def timed(step: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def measure(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, by our clock; two contenders return their own."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + WARMUP):
        for name in in_turn(list(steps), round_):
            seconds = steps[name]() if name in (VLLM, "found") else timed(steps[name])
            if round_ >= WARMUP:
                times[name].append(seconds)
    return times


def make_engine(model: Any, *, deterministic: bool = False) -> InferenceEngineV2:
    host = deepspeed_c.init_inference(copy.deepcopy(model), dtype=torch.bfloat16, replace_with_kernel_inject=True)
    limits = {"memory_config": {"mode": "allocate", "size": 200}}
    return InferenceEngineV2(host, RaggedInferenceEngineConfig(state_manager=limits, deterministic=deterministic))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1152)
    options = parser.parse_args()
    torch.set_num_threads(_C.pool_n_threads())
    exact = make_model(options.layers, options.width)
    plain = copy.deepcopy(exact).bfloat16()
    plain.model.rotary_emb.inv_freq = exact.model.rotary_emb.inv_freq  # as from_pretrained leaves it
    engine, deterministic = make_engine(exact), make_engine(exact, deterministic=True)
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(24, 41, (SEQUENCES,), generator=rng).tolist()
    prompts = [torch.randint(3, VOCAB, (n,), generator=rng) for n in lengths]
    prompt = torch.randint(3, VOCAB, (PROMPT,), generator=rng)

    with torch.no_grad():
        tokens, logits = run(engine, prompts, NEW)
        off = {TOGETHER: 0.0, THEIRS: 0.0}
        for i, each in enumerate(prompts):
            whole = torch.cat([each, tokens[i, :-1]])[None]
            expected = exact(whole).logits[0, -1]
            off[TOGETHER] += float((logits[i] - expected).abs().mean()) / SEQUENCES
            off[THEIRS] += float((plain(whole).logits[0, -1] - expected).abs().mean()) / SEQUENCES
    require(off[TOGETHER] <= 1.1 * off[THEIRS], f"logits as near to fp32 as those of transformers: {off}")
    theirs = continuous(plain, prompts, NEW)
    counts = [len(each.generated_tokens) for each in theirs.values()]
    require(counts == [NEW] * SEQUENCES, f"generate_batch makes as many tokens: {counts}")

    peer = None
    python, folder = os.environ.get("DSC_VLLM_PYTHON"), tempfile.TemporaryDirectory()
    if python:
        peer = Vllm(python, plain, folder.name)
        first = [each[0] for each in peer.ask(prompts, NEW)["tokens"]]
        n_same = sum(a == b for a, b in zip(first, tokens[:, 0].tolist(), strict=True))
        require(n_same >= SEQUENCES // 2, f"vLLM runs the same model: {n_same} of {SEQUENCES} first tokens are ours")
    else:
        print("no vLLM: DSC_VLLM_PYTHON names no Python that has it", file=sys.stderr)

    whole = torch.cat([prompt, prompt[:BEHIND]])

    def one_after_another() -> None:
        for each in prompts:
            run(engine, [each], NEW)

    times = measure(
        {
            TOGETHER: lambda: run(engine, prompts, NEW),
            APART: one_after_another,
            THEIRS: lambda: continuous(plain, prompts, NEW),
            "one piece": lambda: put_pieces(engine, prompt, 1),
            "four pieces": lambda: put_pieces(engine, prompt, PIECES),
            "found": lambda: put_found(engine, whole),
            "not found": lambda: put_pieces(engine, whole, 1),
            "deterministic": lambda: run(deterministic, prompts, NEW),
            **({} if peer is None else {VLLM: lambda: peer.ask(prompts, NEW)["seconds"]}),
        },
        options.rounds,
    )
    common = {
        "benchmark": "ragged",
        "params": sum(param.numel() for param in plain.parameters()),
        "threads": torch.get_num_threads(),
        "machine": machine(),
    }
    others = [APART, THEIRS, *([VLLM] if peer else [])]
    for name in (TOGETHER, "deterministic", *others):
        line = {
            **common, "contender": name, "sequences": SEQUENCES, "new": NEW,
            "ms_per_token": round(median_spread(times[name])[0] / NEW / SEQUENCES * 1e3, 2),
        }  # fmt: skip
        if name == TOGETHER:
            for other, key in zip(others, ("ratio_to_apart", "ratio_to_transformers", "ratio_to_vllm")):
                line |= ratios(key, times[name], times[other])
        elif name == "deterministic":
            line |= ratios("ratio_to_together", times[name], times[TOGETHER])
        print(json.dumps(line), flush=True)
    for name, other, key in (
        ("four pieces", "one piece", "ratio_to_one_piece"),
        ("found", "not found", "ratio_to_not_found"),
    ):
        seconds = round(median_spread(times[name])[0], 4)
        line = {**common, "contender": name, "prompt": PROMPT, "seconds": seconds}
        print(json.dumps(line | ratios(key, times[name], times[other])), flush=True)
    if peer is not None:
        peer.close()
    engine.destroy()
    deterministic.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
