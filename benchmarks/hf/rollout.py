"""How much longer do eight samples of a prompt take in a rollout than one, and how much less than in transformers' `generate`?

A Llama in bf16 under an engine at ZeRO stage 0, one process. A prompt of 512 tokens gets one sample and eight, of one new
token each: then the prompt is nearly all of the work, and the bound is 1 (the prompt is computed once). With 64 new
tokens eight samples are also compared with the model's own `generate`, which gets the prompt eight times, in the same
process and in turns. The tokens that went through the embedding are counted: 512 for a prompt that is computed once.
Run: python -m benchmarks.hf.rollout
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

import deepspeed_c
from benchmarks.measure import machine, median_spread, ratios, require, time_alternately
from deepspeed_c.rollout import RolloutConfig, RolloutRequest, SamplingConfig, build_rollout

SAMPLES, NEW, VOCAB = 8, 64, 32_000
WARMUP = 1


class Tokenizer:
    """The two numbers that a rollout needs. No token ends a response."""

    pad_token_id, eos_token_id = 0, None


def make_model(layers: int, width: int, prompt: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(width // 64, 1)
    sizes = {"hidden_size": width, "intermediate_size": width * 8 // 3, "num_hidden_layers": layers}
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=prompt + NEW,
        pad_token_id=0,
        eos_token_id=None,
        **sizes,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


class Count:
    """The tokens that have gone through an embedding."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        self.n = 0
        embedding.register_forward_hook(self._add)

    def _add(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], outputs: torch.Tensor) -> None:
        self.n += inputs[0].numel()

    def of(self, call: Any) -> int:
        before = self.n
        call(None)
        return self.n - before


def measure(layers: int, width: int, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    model = make_model(layers, width, prompt)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "hybrid_engine": {"enabled": True, "max_out_tokens": prompt + NEW},
        "steps_per_print": 10**9,
    }
    engine = deepspeed_c.initialize(model=model, config=config)[0]
    rollout = build_rollout(RolloutConfig(), student_engine=engine, tokenizer=Tokenizer())
    ids = torch.randint(3, VOCAB, (1, prompt), generator=torch.Generator().manual_seed(0))
    request = RolloutRequest(ids, torch.ones_like(ids))

    def generate(n: int, new_tokens: int) -> Any:
        return lambda _: rollout.generate(request, SamplingConfig(new_tokens, n_samples_per_prompt=n))

    def expanded(_: Any) -> None:
        rows = ids.repeat_interleave(SAMPLES, 0)
        arguments = {"do_sample": True, "max_new_tokens": new, "min_new_tokens": new}
        with torch.no_grad():
            found = type(model).generate(plain, rows, attention_mask=torch.ones_like(rows), **arguments)
        require(found.shape == (SAMPLES, prompt + new), "the model's own generate makes all tokens")

    plain = make_model(layers, width, prompt).eval()
    count = Count(model.get_input_embeddings())
    generate(1, 1)(None)  # the first call tries whether the model can run ragged batches
    for n in (1, SAMPLES):
        seen = count.of(generate(n, 1))
        require(seen == prompt, f"{n} samples read the prompt once: {seen} tokens")
    few = time_alternately({"one": generate(1, 1), "all": generate(SAMPLES, 1)}, None, rounds, WARMUP)
    many = time_alternately({"rollout": generate(SAMPLES, new), "own": expanded}, None, rounds, WARMUP)
    engine.close()
    return {
        "params": sum(p.numel() for p in plain.parameters()),
        "prompt": prompt,
        "ms_one": round(median_spread(few["one"])[0] * 1e3, 1),
        "ms_eight": round(median_spread(few["all"])[0] * 1e3, 1),
        **ratios("eight_over_one", few["all"], few["one"]),
        "ms_rollout": round(median_spread(many["rollout"])[0] * 1e3, 1),
        "ms_own": round(median_spread(many["own"])[0] * 1e3, 1),
        **ratios("ratio_to_own", many["rollout"], many["own"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=NEW)
    args = parser.parse_args()
    row = measure(args.layers, args.width, args.prompt, args.new, args.rounds)
    print(json.dumps({"benchmark": "rollout", "samples": SAMPLES, **row, "machine": machine()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
