"""A Llama sharded over tensor-parallel ranks, with sequences split over the remaining dimension of ranks.

The weights after steps of SGD equal those of one plain process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.errors import RankMismatchError
from deepspeed_c.sequence import SequenceCut
from tests.deepspeed_c.zero.test_tensor_parallel import logical
from tests.hf.stack import llama, on_ranks
from tests.hf.test_sequence import BATCH, RATE, STEPS, batches, check, make_model, plain
from tests.training import engine_of, update

# (model, attention, case, stage, accumulation, clipping)
CELLS: list[tuple[str, str, str, int, int, float]] = [
    ("grouped", "ulysses", "tail", 0, 1, 0.0),
    ("grouped", "ulysses", "packed", 2, 2, 0.1),
    ("grouped", "ring", "plain", 1, 1, 0.1),
    ("grouped", "ring", "packed", 3, 2, 0.0),
    ("two", "auto", "tail", 2, 1, 0.0),  # one head on each tensor-parallel rank is too few for Ulysses on two ranks
]


def config_of(attention: str, stage: int, gas: int, clip: float, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": 3000},
        "sequence_parallel_size": 2,
        "sequence_parallel": {"attention": attention},
        **more,
    }


def train(rank: int, world: int, has_mpu: bool) -> list[Any]:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    found = []
    for kind, attention, case, stage, gas, clip in CELLS:
        config = config_of(attention, stage, gas, clip, tensor_parallel={"autotp_size": 2})
        model, mpu = make_model(kind).train(), None
        if has_mpu:  # its groups are adjacent ranks, so tensor-parallel groups are not
            mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, BATCH)
            del config["sequence_parallel_size"]
        engine = engine_of(model, config, mpu=mpu)
        group = engine.get_sequence_parallel_group()
        data = [batches(case, i) for i in range(STEPS * gas)]
        loader = UlyssesSPDataLoaderAdapter(data, torch.distributed.get_rank(group), group, 2, engine.device)
        norms, given = [], [batch for i, batch in enumerate(loader) if i % 2 == 0]
        for step in range(STEPS):
            for micro in range(gas):
                batch = given[step * gas + micro]
                update(engine, engine(**batch, labels=batch["shift_labels"], use_cache=False).loss)
            norms.append(engine.get_global_grad_norm())
        found.append((logical(engine), norms, engine.dp_world_size, engine.mp_world_size))
        engine.close()
    return found


@pytest.mark.parametrize("has_mpu", [False, True])
def test_with_tensor_parallel_ranks_as_one_plain_process(has_mpu: bool) -> None:
    everyone = on_ranks(4, train, has_mpu)
    for i, (kind, _, case, _, gas, clip) in enumerate(CELLS):
        weights, norms = plain(kind, case, gas, clip)
        for of_rank in everyone:
            assert of_rank[i][2:] == (1, 2)
            check(CELLS[i], of_rank[i], weights, norms)


def cut_by_hand(rank: int, world: int, attention: str) -> list[str]:
    """Ranks whose parts have different shapes raise errors. Training continues afterwards."""
    said = []
    with engine_of(llama().train(), config_of(attention, 1, 1, 0.0)) as engine:
        for n_rows, n_tokens in ((BATCH, 6 + rank), (1 + rank, 6), (BATCH, 6)):
            cut = SequenceCut(2 * n_tokens, world, "zigzag" if attention == "ring" else "contiguous")
            tokens = torch.arange(3, 3 + 2 * n_tokens).expand(n_rows, -1)
            places = torch.arange(2 * n_tokens).expand(n_rows, -1)
            given = {"input_ids": cut.take(tokens, rank, 1), "position_ids": cut.take(places, rank, 1)}
            labels = {"labels": given["input_ids"], "shift_labels": given["input_ids"]}
            if (n_rows, n_tokens) == (BATCH, 6) and len(said) == 2:
                update(engine, engine(**given, **labels, use_cache=False).loss)
                continue
            with pytest.raises(RankMismatchError) as caught:
                engine(**given, **labels, use_cache=False)
            said.append(str(caught.value))
        assert engine.global_steps == 1
    return said


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_batches_that_disagree_are_told_before_anything_is_gathered(attention: str) -> None:
    for lengths, rows in on_ranks(2, cut_by_hand, attention):
        assert "rank 0 has 2 sequences of 6 tokens, and rank 1 2 sequences of 7 tokens" in lengths
        assert "rank 0 has 1 sequences of 6 tokens, and rank 1 2 sequences of 6 tokens" in rows
