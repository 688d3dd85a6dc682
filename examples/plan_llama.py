"""A model for ``deepspeed_c plan`` (docs/out-of-memory.md): a Llama of 1.1 billion parameters, built under ``zero.Init``,
so that planning or starting it never holds the whole model.

Run: deepspeed_c plan --config ds_config.json --batch 4 --seq 4096 --ranks 4 --device cuda examples/plan_llama.py
"""

from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed_c

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}

with deepspeed_c.zero.Init(config_dict_or_path=CONFIG):
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
        )
    )
engine, *_ = deepspeed_c.initialize(model=model, config=CONFIG)
