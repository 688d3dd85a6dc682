"""Two models of transformers over the same ranks, with different sequence orders: both agree with a single process, and
each refuses batches in the order of the other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.errors import ModelError, StateError
from tests import ranks
from tests.hf.stack import PRELOAD, VOCAB, llama
from tests.training import engine_of

TOKENS = 16
HEADS = {"ulysses": (4, 2), "ring": (1, 1)}


def model_of(attention: str) -> Any:
    heads, key_heads = HEADS[attention]
    return llama(num_attention_heads=heads, num_key_value_heads=key_heads)


@ranks.on_ranks(2, preload=PRELOAD)
def test_two_models_in_one_process(rank: int, world: int) -> None:
    from deepspeed_c.sequence.huggingface import UlyssesSPAttentionHF
    from deepspeed_c.sequence.loader import UlyssesSPDataLoaderAdapter

    tokens = torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}]
    engines, wanted = {}, {}
    for attention in HEADS:
        with torch.no_grad():
            wanted[attention] = model_of(attention)(input_ids=tokens, use_cache=False).logits
        model = model_of(attention)
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", world, 1)
        engines[attention] = engine_of(
            model, {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}, mpu=mpu
        )

    def batch_for(engine: Any) -> dict[str, torch.Tensor]:
        group = mpu.get_sequence_parallel_group()
        batch = next(UlyssesSPDataLoaderAdapter(data, rank, group, world, "cpu", model=engine))
        return {key: value for key, value in batch.items() if key != "shift_labels"}

    def logits(attention: str, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return engines[attention](**batch, use_cache=False).logits

    for attention, other in (("ulysses", "ring"), ("ring", "ulysses")):
        for given in (engines[attention], engines[attention].module):
            batch = batch_for(given)
            torch.testing.assert_close(
                logits(attention, batch), wanted[attention][:, batch["position_ids"][0]], rtol=1e-4, atol=1e-5
            )
        batch = batch_for(engines[other])
        for has_mask in (True, False):
            if not has_mask:
                del batch["attention_mask"]
            with pytest.raises(ModelError, match="lie in the order"):
                logits(attention, batch)
    with pytest.raises(StateError, match="LlamaForCausalLM \\(contiguous\\), LlamaForCausalLM \\(zigzag\\)"):
        batch_for(None)
    engines["ring"].close()
    batch = batch_for(None)
    torch.testing.assert_close(
        logits("ulysses", batch), wanted["ulysses"][:, batch["position_ids"][0]], rtol=1e-4, atol=1e-5
    )
    engines["ulysses"].close()
