"""Small models of every family that has a policy, the same on all ranks, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 101  # a prime: no number of ranks divides it


def _text(config: Any, auto: str = "AutoModelForCausalLM") -> torch.nn.Module:
    import transformers

    return getattr(transformers, auto).from_config(config)


def make(family: str) -> torch.nn.Module:
    import transformers as t

    torch.manual_seed(7)
    llama = {
        "hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
        "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    made = {
        "llama": lambda: t.LlamaConfig(**llama),
        "llama_tied_shared": lambda: t.LlamaConfig(**{**llama, "num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True}),
        "qwen2": lambda: t.Qwen2Config(**llama),
        "qwen3": lambda: t.Qwen3Config(**{**llama, "head_dim": 8}),
        "mixtral": lambda: t.MixtralConfig(**{**llama, "intermediate_size": 88, "num_local_experts": 3, "num_experts_per_tok": 2}),
        "deepseek_v3": lambda: t.DeepseekV3Config(
            **{**llama, "num_key_value_heads": 6, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 2, "topk_group": 2,
               "num_experts_per_tok": 2, "kv_lora_rank": 12, "q_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
               "first_k_dense_replace": 1, "head_dim": 4}
        ),
        "deepseek_v2": lambda: t.DeepseekV2Config(
            **{**llama, "num_key_value_heads": 6, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 260,
               "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 1}
        ),
        "phi": lambda: t.PhiConfig(**{**llama, "qk_layernorm": True}),
        "phi3": lambda: t.Phi3Config(**llama),
        "gpt2": lambda: t.GPT2Config(n_embd=48, n_head=6, n_layer=2, vocab_size=VOCAB, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
        "gpt_bigcode": lambda: t.GPTBigCodeConfig(n_embd=48, n_head=6, n_layer=2, vocab_size=VOCAB, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
        "gpt_bigcode_heads": lambda: t.GPTBigCodeConfig(n_embd=48, n_head=6, n_layer=2, vocab_size=VOCAB, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, multi_query=False),
        "codegen": lambda: t.CodeGenConfig(n_embd=64, n_head=16, n_layer=2, vocab_size=VOCAB, n_positions=64, n_ctx=64, rotary_dim=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
        "mpt": lambda: t.MptConfig(d_model=48, n_heads=6, n_layers=2, vocab_size=VOCAB, max_seq_len=64, attn_config={"clip_qkv": 0.05}),
        "gpt_oss": lambda: t.GptOssConfig(**{**llama, "intermediate_size": 44, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5}),
        "gpt_neox": lambda: t.GPTNeoXConfig(**{**llama, "rotary_pct": 0.5}),
        "gptj": lambda: t.GPTJConfig(n_embd=48, n_head=6, n_layer=2, vocab_size=VOCAB, n_positions=64, rotary_dim=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
        "opt": lambda: t.OPTConfig(**{**llama, "ffn_dim": 70, "word_embed_proj_dim": 48, "dropout": 0.0}),
        "bloom": lambda: t.BloomConfig(hidden_size=48, n_head=6, n_layer=2, vocab_size=VOCAB),
        "falcon": lambda: t.FalconConfig(hidden_size=48, num_attention_heads=6, num_hidden_layers=2, vocab_size=VOCAB, new_decoder_architecture=True, num_kv_heads=3, alibi=True),
        "falcon_40b": lambda: t.FalconConfig(hidden_size=48, num_attention_heads=6, num_hidden_layers=2, vocab_size=VOCAB, new_decoder_architecture=True, num_kv_heads=3),
        "falcon_7b": lambda: t.FalconConfig(hidden_size=48, num_attention_heads=6, num_hidden_layers=2, vocab_size=VOCAB, multi_query=True),
        "starcoder2": lambda: t.Starcoder2Config(**{**llama, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
        "cohere": lambda: t.CohereConfig(**llama),
        "granite_swa": lambda: t.GraniteSWAConfig(**llama),
        "granite": lambda: t.GraniteConfig(**llama),
        "apertus": lambda: t.ApertusConfig(**llama),
        "aria": lambda: t.AriaTextConfig(**{**llama, "intermediate_size": 40, "moe_num_experts": 3, "moe_topk": 2, "moe_num_shared_experts": 1}),
        "inkling": lambda: t.InklingTextConfig(
            **{
                **llama,
                "moe_intermediate_size": 88,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_shared_experts": 2,
                "swa_num_attention_heads": 6,
                "swa_num_key_value_heads": 3,
                "head_dim": 8,
                "swa_head_dim": 8,
                "d_rel": 4,
                "rel_extent": 16,
                "sliding_window_size": 5,
                "mlp_layer_types": ["dense", "sparse"],
            }
        ),
        "llama4": lambda: t.Llama4TextConfig(
            **{**llama, "intermediate_size": 40, "intermediate_size_mlp": 70, "num_local_experts": 3, "num_experts_per_tok": 1, "head_dim": 8, "interleave_moe_layer_step": 2}
        ),
    }  # fmt: skip
    if family in made:
        return _text(made[family]())
    if family == "bert":
        config = t.BertConfig(hidden_size=48, num_attention_heads=6, num_hidden_layers=2, intermediate_size=70, vocab_size=VOCAB,
                              hidden_dropout_prob=0, attention_probs_dropout_prob=0)  # fmt: skip
        return _text(config, "AutoModelForMaskedLM")
    if family == "distilbert":
        return _text(
            t.DistilBertConfig(
                dim=48, n_heads=6, n_layers=2, hidden_dim=70, vocab_size=VOCAB, dropout=0, attention_dropout=0
            ),
            "AutoModelForMaskedLM",
        )
    if family == "t5":
        return _text(
            t.T5Config(
                d_model=48,
                d_kv=8,
                num_heads=6,
                num_layers=2,
                d_ff=70,
                vocab_size=VOCAB,
                dropout_rate=0.0,
                pad_token_id=0,
                decoder_start_token_id=0,
            ),
            "AutoModelForSeq2SeqLM",
        )
    if family == "clip":
        text = {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_hidden_layers": 2,
            "intermediate_size": 70,
            "vocab_size": VOCAB,
        }
        vision = {
            "hidden_size": 40,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "intermediate_size": 50,
            "image_size": 8,
            "patch_size": 4,
        }
        return t.CLIPModel(t.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    raise KeyError(family)


def feed(family: str) -> dict[str, torch.Tensor]:
    """The inputs of a family, the same in every call."""
    rng = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (2, 9), generator=rng)
    if family == "clip":
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8, generator=rng), "return_loss": True}
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


FAMILIES = (
    *("llama", "llama_tied_shared", "qwen2", "qwen3", "mixtral", "deepseek_v3", "phi", "phi3", "gpt2", "gpt_neox", "gptj", "opt", "bloom"),
    *("falcon", "falcon_7b", "starcoder2", "bert", "distilbert", "t5", "clip", "gpt_bigcode", "gpt_bigcode_heads"),
    *("codegen", "mpt", "gpt_oss"),
)  # fmt: skip
"""Families that a policy cuts."""
PLANNED = ("cohere", "granite", "aria", "llama4", "apertus", "granite_swa", "inkling")
"""Families without a policy, which are cut by transformers' own plan."""
