"""Generation by an engine in training with models of several families: at each stage, with LoRA, with ranks that
generate together and with ranks that end apart, the tokens are those of a plain model with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed_c
from tests import training
from tests.cells import every
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")

VOCAB = 47
_COMMON = {"vocab_size": VOCAB, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
# Family: the configuration's class and settings, and two layers for LoRA.
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": (
        "LlamaConfig",
        {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64},
        ["q_proj", "down_proj"],
    ),
    "opt": (
        "OPTConfig",
        {
            **_SIZES,
            "ffn_dim": 40,
            "word_embed_proj_dim": 24,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "init_std": 0.3,
        },
        ["v_proj", "fc2"],
    ),
    "gpt2": (  # query, key and value in one matrix, [in, out]; tied tables
        "GPT2Config",
        {
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        ["c_attn", "mlp.c_proj"],
    ),
    "gpt_neox": (  # query, key and value in one matrix, head by head
        "GPTNeoXConfig",
        {**_SIZES, "intermediate_size": 40, "max_position_embeddings": 64},
        ["query_key_value", "dense_4h_to_h"],
    ),
    "bloom": ("BloomConfig", {"hidden_size": 24, "n_layer": 2, "n_head": 4}, ["query_key_value", "dense_h_to_4h"]),
    "mixtral": (  # experts
        "MixtralConfig",
        {
            **_SIZES,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        ["q_proj", "o_proj"],
    ),
}
# Stage, and whether weights lie in joint memory.
CELLS = [(0, False), (2, False), (3, False), (3, True)]


def make_model(family: str, *, lora: bool) -> Any:
    kind, sizes, targets = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers, kind)(**{**_COMMON, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    if not lora:
        return model
    import peft

    adapter = peft.LoraConfig(
        r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2"
    )
    return peft.get_peft_model(model, adapter)


def write(model: Any, prompts: torch.Tensor, n_tokens: int) -> torch.Tensor:
    mask = (prompts != 0).long()
    return model.generate(input_ids=prompts, attention_mask=mask, max_new_tokens=n_tokens, do_sample=False)


def cell_body(rank: int, world: int, family: str) -> list[str]:
    wrong = []
    prompts = torch.tensor([[0, 0, 7 + rank, 11, 3], [5, 9, 2, 31 + rank, 8]])
    n_tokens = 3 + 8 * rank  # rank 0 ends before rank 1
    for stage, joint in CELLS:
        for lora, n_together in ((False, 1), (True, 1), (False, 2), (True, 2)):
            config = training.config(
                stage,
                "AdamW",
                zero={"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30},
                rows=2,
                lr=1e-2,
                comm={"local": "shm", "zero_copy_gather": joint},
                hybrid_engine={"enabled": True, "inference_tp_size": n_together},
            )
            with deepspeed_c.initialize(model=make_model(family, lora=lora), config=config)[0] as engine:
                for turn in range(2):
                    twin = make_model(family, lora=lora).eval()
                    twin.load_state_dict({k: v.clone() for k, v in engine.module_state_dict().items()}, strict=False)
                    engine.eval()
                    got, want = write(engine.module, prompts, n_tokens), write(twin, prompts, n_tokens)
                    if not torch.equal(got, want):
                        cell = f"stage {stage}, joint {joint}, lora {lora}, {n_together} together, turn {turn}"
                        wrong.append(f"{cell}: got {got.tolist()}, want {want.tolist()}")
                    engine.train()
                    training.step(engine, input_ids=got, labels=got)
    return wrong


@pytest.mark.parametrize("family", every(2, FAMILIES))
def test_tokens_are_those_of_a_plain_model(family: str) -> None:
    pytest.importorskip("peft")
    for rank, wrong in enumerate(run_ranks(2, cell_body, family)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)
