"""Models of transformers that only the configuration cuts. At every stage they are trained as the whole model in one
plain torch process."""

from __future__ import annotations

import pytest
import torch

from tests.deepspeed_c.inject.families import VOCAB, make
from tests.deepspeed_c.zero.test_tensor_parallel import logical
from tests.ranks import run_ranks
from tests.training import config, descend_together, engine_of, update

STEPS = 2


def batch(step: int, data_rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    ids = torch.randint(3, VOCAB, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": ids}


def make_config(n_tp: int, stage: int) -> dict:
    zero = {"stage3_param_persistence_threshold": 50}
    tensor_parallel = {"autotp_size": n_tp}
    params = {"eps": 1e-4}
    return config(
        stage, "Adam", rows=2, lr=1e-2, params=params, zero=zero, gradient_clipping=0.5, tensor_parallel=tensor_parallel
    )


def plain(family: str, n_data: int, steps: int = STEPS):
    model = make(family).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    norms = []
    for step in range(steps):
        losses = (model(**batch(step, rank)).loss / n_data for rank in range(n_data))
        norms.append(descend_together(optimizer, losses, 0.5))
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def train(engine, first: int = 0) -> list[float]:
    norms = []
    for step in range(first, first + STEPS):
        update(engine, engine(**batch(step, engine._mesh.index("dp_replicate", "dp_shard"))).loss)
        norms.append(engine.get_global_grad_norm())
    return norms


def body(rank: int, world: int, n_tp: int, family: str, stages: list[int], folder: str):
    found = []
    for stage in stages:
        config = make_config(n_tp, stage)
        with engine_of(make(family).train(), config) as engine:
            norms = train(engine)
            found.append((logical(engine), norms))
    with engine_of(make(family).train(), config) as engine:
        train(engine)
        engine.save_checkpoint(folder, "t")
        engine.save_model(folder + "/hf")
    return found


def load_body(rank: int, world: int, family: str, folder: str):
    import transformers

    read = transformers.AutoModelForCausalLM.from_pretrained(folder + "/hf")
    with engine_of(make(family).train(), make_config(1, 0)) as engine:
        engine.load_checkpoint(folder)
        weights = logical(engine)
        assert all(torch.equal(weights[name], p.detach()) for name, p in read.named_parameters())
        return weights, train(engine, STEPS)


@pytest.mark.parametrize(
    ("family", "n_tp", "n_data", "stages"),
    [("llama", 2, 1, [0, 1, 2, 3]), ("llama_tied_shared", 2, 2, [1, 3]), ("gpt2", 3, 1, [2, 3]), ("qwen3", 2, 1, [2])],
)
def test_cut_by_the_configuration_alone(tmp_path, family: str, n_tp: int, n_data: int, stages: list[int]) -> None:
    weights, norms = plain(family, n_data)
    everyone = run_ranks(
        n_tp * n_data, body, n_tp, family, stages, str(tmp_path), preload="tests.deepspeed_c.inject.preload"
    )
    for of_rank in everyone:
        for stage, (got, got_norms) in zip(stages, of_rank):
            torch.testing.assert_close(got_norms, norms, rtol=1e-4, atol=0, msg=f"{stage=} {got_norms} {norms}")
            assert got.keys() == weights.keys()
            for name, value in weights.items():
                torch.testing.assert_close(got[name], value, rtol=1e-3, atol=2e-5, msg=lambda m: f"{stage=} {name} {m}")  # noqa: B023
    (saved, more), *_ = run_ranks(1, load_body, family, str(tmp_path), preload="tests.deepspeed_c.inject.preload")
    for name, value in everyone[0][-1][0].items():
        assert torch.equal(saved[name], value), name
    if n_data == 1:
        torch.testing.assert_close(more, plain(family, 1, 2 * STEPS)[1][STEPS:], rtol=1e-3, atol=0)


def drop_body(rank: int, world: int, stage: int, recompute: dict, folder: str):
    """Trains two steps, saves, and trains two more. Then an engine with other random numbers loads the checkpoint."""
    found = []
    for seed in (5, 6):
        model = make("llama").train()
        assert hasattr(model.config, "attention_dropout")
        model.config.attention_dropout = 0.4
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.4
        torch.manual_seed(seed)
        with engine_of(model, {**make_config(2, stage), **recompute}) as engine:
            if seed == 5:
                norms = train(engine)
                engine.save_checkpoint(folder, "t")
            else:
                engine.load_checkpoint(folder)
                norms = []
            found.append((norms, train(engine, STEPS), logical(engine)))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_dropout_in_the_cut_region_is_drawn_again_alike(tmp_path, stage: int) -> None:
    """Recomputation and a load change no bit of the results."""
    kept = run_ranks(2, drop_body, stage, {}, str(tmp_path / "kept"), preload="tests.deepspeed_c.inject.preload")
    again = {"activation_checkpointing": {"layers": "auto"}}
    recomputed = run_ranks(
        2, drop_body, stage, again, str(tmp_path / "again"), preload="tests.deepspeed_c.inject.preload"
    )
    for ((norms, more, weights), loaded), ((same_norms, same_more, same_weights), _) in zip(
        kept, recomputed, strict=True
    ):
        assert (norms, more) == (same_norms, same_more)
        assert max(abs(a / b - 1) for a, b in zip(norms, plain("llama", 1)[1])) > 0.01, norms  # dropout had an effect
        assert more == loaded[1]
        for name, value in weights.items():
            assert torch.equal(value, same_weights[name]) and torch.equal(value, loaded[2][name]), name
