"""How long does the ragged engine take for 16 sequences, against one after another and against transformers' continuous batching?

A Llama of 350M parameters in bf16, on all processors of one process, greedy; 16 prompts of 24 to 40 tokens and 32 more
each. Together: one ``put`` of all prompts, then one ``put`` a token. "one after another" puts the sequences of the same
engine singly. ``generate_batch`` of transformers runs the same prompts. Logits of the last tokens have to be as near to
those of fp32 as transformers' in bf16. A prompt of 512 tokens comes in one piece and in four.
Run: python -m benchmarks.hf.ragged [--rounds 6] [--layers 16] [--width 1152]
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from typing import Any

import torch

import deepspeed_c
from benchmarks.hf.generate import VOCAB, make_model
from benchmarks.measure import in_turn, machine, median_spread, ratios, require
from deepspeed_c import _C
from deepspeed_c.inference.v2 import InferenceEngineV2, RaggedInferenceEngineConfig

SEQUENCES, NEW, PROMPT, PIECES = 16, 32, 512, 4
WARMUP = 1
TOGETHER, APART, THEIRS = "together", "one after another", "transformers"


def run(engine: InferenceEngineV2, prompts: list[torch.Tensor], n_new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(new tokens [sequences, n_new], logits of the last ones), all sequences together."""
    uids, tokens, found = list(range(len(prompts))), prompts, []
    for _ in range(n_new):
        logits = engine.put(uids, tokens)
        tokens = list(logits.argmax(-1, keepdim=True))
        found.append(torch.cat(tokens))
    for uid in uids:
        engine.flush(uid)
    return torch.stack(found, 1), logits


def put_pieces(engine: InferenceEngineV2, prompt: torch.Tensor, n_pieces: int) -> torch.Tensor:
    for piece in prompt.chunk(n_pieces):
        logits = engine.put([0], [piece])
    engine.flush(0)
    return logits


def continuous(model: Any, prompts: list[torch.Tensor], n_new: int) -> Any:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=n_new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return model.generate_batch([each.tolist() for each in prompts], generation_config=config, progress_bar=False)


def timed(step: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def measure(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + WARMUP):
        for name in in_turn(list(steps), round_):
            seconds = timed(steps[name])
            if round_ >= WARMUP:
                times[name].append(seconds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1152)
    options = parser.parse_args()
    torch.set_num_threads(_C.pool_n_threads())
    exact = make_model(options.layers, options.width)
    plain = copy.deepcopy(exact).bfloat16()
    plain.model.rotary_emb.inv_freq = exact.model.rotary_emb.inv_freq  # as from_pretrained leaves it
    host = deepspeed_c.init_inference(copy.deepcopy(exact), dtype=torch.bfloat16, replace_with_kernel_inject=True)
    memory = {"mode": "allocate", "size": 200}
    engine = InferenceEngineV2(host, RaggedInferenceEngineConfig(state_manager={"memory_config": memory}))
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
        },
        options.rounds,
    )
    common = {
        "benchmark": "ragged",
        "params": sum(param.numel() for param in plain.parameters()),
        "threads": torch.get_num_threads(),
        "machine": machine(),
    }
    for name in (TOGETHER, APART, THEIRS):
        line = {
            **common, "contender": name, "sequences": SEQUENCES, "new": NEW,
            "ms_per_token": round(median_spread(times[name])[0] / NEW / SEQUENCES * 1e3, 2),
        }  # fmt: skip
        if name == TOGETHER:
            line |= ratios("ratio_to_apart", times[name], times[APART])
            line |= ratios("ratio_to_transformers", times[name], times[THEIRS])
        print(json.dumps(line), flush=True)
    pieces = ratios("ratio_to_one_piece", times["four pieces"], times["one piece"])
    seconds = round(median_spread(times["four pieces"])[0], 4)
    print(
        json.dumps({**common, "contender": "four pieces", "prompt": PROMPT, "seconds": seconds, **pieces}), flush=True
    )
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
