"""How long does `generate` take through `init_inference`, with kernels and without them, against the model's own?

A Llama of 350M parameters in bf16, on all processors of one process, greedy; prompts of 32 tokens and 64 more, for 1 and
8 rows; and a prompt of 512 tokens and 1 more. Three copies of one model take turns. The engine's logits at each new
token must be as near to those of fp32 as the logits of transformers in bf16. The bound is one read of the weights by C for
each token, without the table of embeddings; the time of a prompt has another bound, and none is given.
DSC_LLAMA_PYTHON names the interpreter of an environment with `pip install llama-cpp-python gguf`. llama.cpp then
generates from the same weights in a process of its own, with as many threads, and takes turns with the others.
Run: python -m benchmarks.hf.generate [--rounds 12] [--layers 16] [--width 1152]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import deepspeed_c
from benchmarks.hf.llama_cpp import write_weights
from benchmarks.measure import bound, in_turn, machine, median_spread, ratios, require
from benchmarks.served import Served
from benchmarks.stream import stream_read
from deepspeed_c import _C

ROOT = Path(__file__).resolve().parents[2]
THEIRS = "llama.cpp"
VOCAB = 32000
WARMUP = 1


class Call(NamedTuple):
    rows: int
    prompt: int
    new: int


CALLS = (Call(1, 32, 64), Call(8, 32, 64), Call(1, 512, 1))


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


class LlamaCpp:
    """The process of llama.cpp that `benchmarks.hf.llama_cpp` is."""

    def __init__(self, python: str, model: Any, folder: str) -> None:
        self._folder = Path(folder)
        write_weights(model, self._folder)
        command = [python, "-m", "benchmarks.hf.llama_cpp", folder, "--threads", str(torch.get_num_threads())]
        self._served = Served(command, {**os.environ, "PYTHONPATH": str(ROOT)})
        about = self._served.answer()
        require(about["params"] == model.num_parameters(), f"{THEIRS} has all parameters: {about}")

    def ask(self, ids: torch.Tensor, n_new: int, **more: Any) -> dict[str, Any]:
        self._served.ask(json.dumps({"prompts": ids.tolist(), "n_new": n_new, **more}))
        return self._served.answer()

    def generate(self, ids: torch.Tensor, n_new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(all tokens, logits of the new ones)."""
        file = self._folder / "logits.npy"
        found = self.ask(ids, n_new, logits=str(file))
        return torch.cat([ids, torch.tensor(found["tokens"])], 1), torch.from_numpy(np.load(file))

    def close(self) -> None:
        self._served.close()


def measure(call: Call, rounds: int, contenders: dict[str, Any], exact: torch.nn.Module, peer: LlamaCpp | None) -> None:
    ids = torch.randint(3, VOCAB, (call.rows, call.prompt), generator=torch.Generator().manual_seed(call.rows))
    table = contenders["transformers"].get_input_embeddings().weight  # a token reads one of its rows
    weights = [param.detach() for param in contenders["transformers"].parameters() if param is not table]
    words = sum(int(weight.view(-1).view(torch.int64).sum()) for weight in weights) % 2**64

    def read_weights() -> float:
        seconds = 0.0
        for _ in range(call.new):
            read_s, found = stream_read(weights)
            require(found == words, f"the bound reads all weights: {found} {words}")
            seconds += read_s
        return seconds

    def generate(model: Any, rows: int = call.rows, **more: Any) -> Any:
        lengths = {"max_new_tokens": call.new, "eos_token_id": None}
        given = {
            "attention_mask": torch.ones_like(ids[:rows]),
            "do_sample": False,
            "pad_token_id": 0,
            **lengths,
            **more,
        }
        return model.generate(ids[:rows], **given)

    def logits_of(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = generate(model, return_dict_in_generate=True, output_logits=True)
        return found.sequences, torch.stack(found.logits, 1).float()

    def distance(sequences: torch.Tensor, logits: torch.Tensor) -> float:
        """The mean distance of logits from fp32, at each new token."""
        require(torch.equal(sequences[:, call.prompt :], logits.argmax(-1)), "tokens have the largest logits")
        return float((logits - exact(sequences).logits[:, call.prompt - 1 : -1]).abs().mean())

    def timed(step: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    with torch.no_grad():
        far = {name: distance(*logits_of(model)) for name, model in contenders.items()}
        if peer is not None:
            far[THEIRS] = distance(*peer.generate(ids, call.new))
    require(max(far.values()) <= 1.1 * far["transformers"], f"logits as near to fp32 as those of transformers: {far}")
    steps = {name: lambda model=model: timed(lambda: generate(model)) for name, model in contenders.items()}
    if peer is not None:
        steps[THEIRS] = lambda: peer.ask(ids, call.new)["seconds"]
    names = list(steps)
    steps["one row"] = lambda: timed(lambda: generate(contenders["kernels"], 1))
    steps["bound"] = read_weights
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + WARMUP):
        for name in in_turn(list(steps), round_):
            seconds = steps[name]()
            if round_ >= WARMUP:
                times[name].append(seconds)
    for name in names:
        line = {
            "benchmark": "generate",
            "contender": name,
            **call._asdict(),
            "params": sum(param.numel() for param in contenders["transformers"].parameters()),
            "ms_per_token": round(median_spread(times[name])[0] / call.new * 1e3, 2),
            **ratios("ratio_to_transformers", times[name], times["transformers"]),
            **(ratios("ratio_to_llama_cpp", times[name], times[THEIRS]) if peer is not None else {}),
            **(ratios("ratio_to_one_row", times[name], times["one row"]) if call.rows > 1 else {}),
            **(bound("ratio_to_bound", times[name], times["bound"]) if call.new > 1 else {}),
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
    python, peer = os.environ.get("DSC_LLAMA_PYTHON"), None
    with tempfile.TemporaryDirectory() as folder:
        if python:
            peer = LlamaCpp(python, plain, folder)
        else:
            print("no llama.cpp: DSC_LLAMA_PYTHON names no Python that has llama_cpp and gguf", file=sys.stderr)
        for call in CALLS:
            measure(call, args.rounds, contenders, exact, peer)
        if peer is not None:
            peer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
