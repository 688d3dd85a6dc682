"""Small mixtures of transformers whose experts matter for the loss, the same on all ranks, and batches for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

VOCAB, WIDTH, N_EXPERTS, N_CHOSEN = 64, 32, 4, 2
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "olmoe")

_SIZES = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": N_CHOSEN, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "intermediate_size": 24, "moe_intermediate_size": 16, "n_routed_experts": N_EXPERTS,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_SPARSE = {"intermediate_size": 24, "moe_intermediate_size": 16, "num_experts": N_EXPERTS, "decoder_sparse_step": 1}
_OWN = {
    "mixtral": {"intermediate_size": 24, "num_local_experts": N_EXPERTS},
    "qwen2_moe": {**_SPARSE, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**_SPARSE, "head_dim": 8, "norm_topk_prob": True},
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "gpt_oss": {"head_dim": 8, "intermediate_size": 16, "num_local_experts": N_EXPERTS, "sliding_window": 4},
    "olmoe": {"intermediate_size": 16, "num_experts": N_EXPERTS},
}


def config_of(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**_SIZES, **_OWN[family], **changes})


def make(family: str, seed: int = 5, **changes: Any) -> Any:
    """A model in training mode. Large weights let the experts act."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(family, **changes))
    fill(model, seed)
    return model.train()


def fill(model: torch.nn.Module, seed: int = 5) -> None:
    rng = torch.Generator().manual_seed(seed)
    tensors = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if "bias" in name)]
    with torch.no_grad():
        for name, tensor in tensors:
            noise = torch.randn(tensor.shape, generator=rng)
            tensor.copy_(1 + 0.1 * noise if tensor.dim() == 1 and name.endswith("weight") else 0.3 * noise)


def rows_of(step: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
    """A batch of each step, micro-batch and rank. Ranks have different numbers of tokens."""
    rng = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    ids = torch.randint(3, VOCAB, (2, 6 + rank), generator=rng)
    return {"input_ids": ids, "labels": ids}


def assert_equal_tensors(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], names: Iterable[str] | None = None, **near: float
) -> None:
    """``near``: rtol and atol; without them values are equal to the bit."""
    for name in expected if names is None else names:
        torch.testing.assert_close(
            found[name],
            expected[name],
            rtol=near.get("rtol", 0),
            atol=near.get("atol", 0),
            msg=lambda m, n=name: f"{n}: {m}",
        )
