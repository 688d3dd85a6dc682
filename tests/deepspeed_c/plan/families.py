"""A small transformers model of each family, with its inputs."""

from __future__ import annotations

from typing import Any

import torch

N_WORDS, WIDTH, N_LAYERS, N_HEADS = 503, 64, 3, 4
_USUAL = {
    "vocab_size": N_WORDS, "hidden_size": WIDTH, "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS,
}  # fmt: skip
_GPT2 = {"vocab_size": N_WORDS, "n_embd": WIDTH, "n_layer": N_LAYERS, "n_head": N_HEADS, "n_positions": 256}
_T5 = {
    "vocab_size": N_WORDS, "d_model": WIDTH, "d_kv": 16, "d_ff": 256, "num_layers": N_LAYERS, "num_heads": N_HEADS,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**_USUAL, "intermediate_size": 172, "num_key_value_heads": 2}),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "bert": ("BertForMaskedLM", {**_USUAL, "intermediate_size": 256}),
    "qwen2": ("Qwen2ForCausalLM", {**_USUAL, "intermediate_size": 172, "num_key_value_heads": 2}),
    "opt": ("OPTForCausalLM", {**_USUAL, "ffn_dim": 256, "word_embed_proj_dim": WIDTH}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_USUAL, "intermediate_size": 256}),
    "t5": ("T5ForConditionalGeneration", _T5),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": N_WORDS, "hidden_size": WIDTH, "n_layer": N_LAYERS, "n_head": N_HEADS},
    ),
    "falcon": ("FalconForCausalLM", _USUAL),
    "phi": ("PhiForCausalLM", {**_USUAL, "intermediate_size": 256}),
}


def make(family: str) -> torch.nn.Module:
    import transformers

    name, settings = FAMILIES[family]
    cls = getattr(transformers, name)
    return cls(cls.config_class(**settings))


def tokens(n_samples: int, n_tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, N_WORDS, (n_samples, n_tokens), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}
