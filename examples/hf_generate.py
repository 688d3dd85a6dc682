"""Continues a text with a model that examples/hf_trainer.py has trained, on all ranks together. To start it:

    deepspeed_c --num_procs 2 examples/hf_generate.py out/hf/model --prompt "def main("

One token of such a model is one byte. Models with a tokenizer need no script: ``deepspeed_c generate MODEL_DIR``.
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import AutoModelForCausalLM

import deepspeed_c


def main() -> str:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--bytes", type=int, default=64, help="length of the continuation")
    parser.add_argument("--sample", action="store_true", help="draw bytes; default: the likeliest")
    args = parser.parse_args()
    engine = deepspeed_c.init_inference(
        AutoModelForCausalLM.from_pretrained(args.model),
        tensor_parallel={"tp_size": int(os.environ.get("WORLD_SIZE", "1"))},
        dtype=torch.float32,
        replace_with_kernel_inject=True,
    )
    with engine:
        ids = torch.tensor([list(args.prompt.encode())])
        tokens = engine.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.bytes, do_sample=args.sample, pad_token_id=0
        )
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    if engine.global_rank == 0:
        print(text)
    return text


if __name__ == "__main__":
    main()
