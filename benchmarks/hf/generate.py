"""How long does `generate` take through `init_inference`, with kernels and without them, against the model's own?

A Llama of 350M parameters in bf16, on all processors of one process, greedy; prompts of 32 tokens, and 16 more. Three
copies of one model take turns. The engine's logits at each new token must be as near to those of fp32 as the logits of
transformers in bf16. The bound is one pass over the weights for each token: they do not fit the caches.
Run: python -m benchmarks.hf.generate [--rounds 12] [--layers 16] [--width 1152]
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from typing import Any

import torch

import deepspeed_c
from benchmarks.measure import bound, in_turn, machine, median_spread, ratios, require
from deepspeed_c import _C

PROMPT, NEW, VOCAB = 32, 16, 32000
WARMUP = 1


def make_model(layers: int, width: int, vocab: int = VOCAB) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=vocab,
        max_position_embeddings=2048,
    )
    return transformers.LlamaForCausalLM(config).eval()


def measure(rows: int, rounds: int, contenders: dict[str, Any], exact: torch.nn.Module) -> None:
    ids = torch.randint(3, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(rows))
    weights = [param.detach().view(-1).view(torch.int16) for param in contenders["transformers"].parameters()]

    def pass_over_weights() -> None:
        for _ in range(NEW):
            for weight in weights:
                weight.max()

    def generate(model: Any, **more: Any) -> Any:
        lengths = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **lengths, **more}
        return model.generate(ids, **given)

    def distance(model: Any) -> float:
        """The mean distance of logits from fp32, at each new token."""
        found = generate(model, return_dict_in_generate=True, output_logits=True)
        wanted = exact(found.sequences).logits[:, PROMPT - 1 : -1]
        return float((torch.stack(found.logits, 1).float() - wanted).abs().mean())

    with torch.no_grad():
        far = {name: distance(model) for name, model in contenders.items()}
    require(max(far.values()) <= 1.1 * far["transformers"], f"logits as near to fp32 as those of transformers: {far}")
    steps = {name: lambda model=model: generate(model) for name, model in contenders.items()}
    steps["bound"] = pass_over_weights
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + WARMUP):
        for name in in_turn(list(steps), round_):
            begin = time.perf_counter()
            steps[name]()
            if round_ >= WARMUP:
                times[name].append(time.perf_counter() - begin)
    for name in contenders:
        line = {
            "benchmark": "generate",
            "contender": name,
            "rows": rows,
            "params": sum(param.numel() for param in contenders["transformers"].parameters()),
            "ms_per_token": round(median_spread(times[name])[0] / NEW * 1e3, 2),
            **ratios("ratio_to_transformers", times[name], times["transformers"]),
            **bound("ratio_to_bound", times[name], times["bound"]),
            "threads": torch.get_num_threads(),
            "machine": machine(),
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1152)
    args = parser.parse_args()
    torch.set_num_threads(_C.pool_n_threads())
    exact = make_model(args.layers, args.width)
    plain = copy.deepcopy(exact).bfloat16()
    contenders = {
        "transformers": plain,
        "engine": deepspeed_c.init_inference(copy.deepcopy(exact), dtype=torch.bfloat16),
        "kernels": deepspeed_c.init_inference(
            copy.deepcopy(exact), dtype=torch.bfloat16, replace_with_kernel_inject=True
        ),
    }
    plain.model.rotary_emb.inv_freq = exact.model.rotary_emb.inv_freq  # as from_pretrained leaves it
    for rows in (1, 8):
        measure(rows, args.rounds, contenders, exact)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
