"""Models cut by hand over tensor-parallel ranks, at every stage: weights, losses and norms are those of the whole model in one plain torch process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed_c
from deepspeed_c.zero.layout.cuts import cut_of
from tests.deepspeed_c.zero.megatron import Mpu, Toy, batch
from tests.ranks import run_ranks

STEPS = 3


def make_config(stage: int, optimizer: str = "Adam", gas: int = 1, **more) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": optimizer, "params": {"lr": 3e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": 300},
        **more,
    }


def make_engine(n_tp: int, config: dict, seed: int = 3, **more):
    mpu = Mpu(n_tp)
    model = Toy(seed, mpu.get_tensor_model_parallel_group() if n_tp > 1 else None, **more)
    return deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)[0]


def train(engine, gas: int, steps: int = STEPS, first: int = 0) -> tuple[list[float], list[float]]:
    data_rank = engine._mesh.index("dp_replicate", "dp_shard")
    losses, norms = [], []
    for step in range(first, first + steps):
        for micro in range(gas):
            loss = engine(*batch(step, micro, data_rank))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def logical(engine) -> dict[str, torch.Tensor]:
    """The fp32 masters of the whole model, put together by the test: every element from each rank that has it, where all of them agree."""
    tp = engine._mesh.along("tp")
    found = {}
    for name, p in engine.module.named_parameters():
        parts = tp.gather_objects((deepspeed_c.utils.safe_get_full_fp32_param(p), cut_of(p)))
        whole = torch.full(parts[0][0].shape if parts[0][1] is None else parts[0][1].logical_shape, torch.nan)
        for value, cut in parts:
            before = whole.clone()
            if cut is None:
                whole = value.clone()
            else:
                cut.put(value, whole)
            known = ~before.isnan()
            assert torch.equal(before[known], whole[known]), f"copies of {name} differ"
        assert not whole.isnan().any(), name
        found[name] = whole
    return found


def plain(n_data: int, gas: int, clip: float, steps: int = STEPS) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(weights, norms) of one process of plain torch that sees all samples."""
    model = Toy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(n_data):
            for micro in range(gas):
                (model(*batch(step, micro, rank)) / (n_data * gas)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def parity_body(rank: int, world: int, n_tp: int, cells: list[tuple[int, int, float, dict]]):
    results = []
    for stage, gas, clip, more in cells:
        with make_engine(n_tp, make_config(stage, gas=gas, gradient_clipping=clip, **more)) as engine:
            assert engine.dp_world_size == world // n_tp and engine.train_batch_size() == 4 * gas * world // n_tp
            _, norms = train(engine, gas)
            results.append((logical(engine), norms))
    return results


CELLS = [(0, 1, 0.0, {}), (1, 2, 0.5, {}), (2, 1, 0.5, {}), (2, 2, 0.0, {"prescale_gradients": True}), (3, 2, 0.5, {})]


@pytest.mark.parametrize(("n_tp", "n_data"), [(2, 1), (3, 1), (2, 2)])
def test_parity_with_one_plain_process(n_tp: int, n_data: int) -> None:
    everyone = run_ranks(n_tp * n_data, parity_body, n_tp, CELLS)
    for i, (stage, gas, clip, _) in enumerate(CELLS):
        weights, norms = plain(n_data, gas, clip)
        for rank, of_rank in enumerate(everyone):
            got, got_norms = of_rank[i]
            torch.testing.assert_close(got_norms, norms, rtol=1e-5, atol=0, msg=f"{stage=} {rank=} {got_norms} {norms}")
            for name, value in weights.items():
                torch.testing.assert_close(got[name], value, rtol=2e-4, atol=2e-5, msg=lambda m: f"{stage=} {name} {m}")  # noqa: B023


def save_body(rank: int, world: int, n_tp: int, stage: int, folder: str, more: dict):
    with make_engine(n_tp, make_config(stage, **more)) as engine:
        train(engine, 1)
        engine.save_checkpoint(folder, "t")
        weights = logical(engine)
        before = engine.global_steps
        train(engine, 1, 2, first=before)
        return weights, logical(engine), engine.get_global_grad_norm()


def load_body(rank: int, world: int, n_tp: int, stage: int, folder: str, more: dict):
    with make_engine(n_tp, make_config(stage, **more), seed=9) as engine:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None and engine.global_steps == STEPS
        weights = logical(engine)
        train(engine, 1, 2, first=STEPS)
        return weights, logical(engine), engine.get_global_grad_norm()


# (tensor-parallel ranks, data-parallel ranks, stage): every size and stage on both sides.
ARRANGEMENTS = [(1, 1, 0), (2, 1, 1), (3, 1, 2), (2, 2, 3), (1, 2, 2)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_loads_on_any_arrangement(tmp_path, precision: str) -> None:
    """What is loaded is bit for bit what was saved, and training goes on as it would have."""
    more = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    cells = ARRANGEMENTS if precision == "fp32" else ARRANGEMENTS[1:4]
    saved = []
    for i, (n_tp, n_data, stage) in enumerate(cells):
        saved.append(run_ranks(n_tp * n_data, save_body, n_tp, stage, str(tmp_path / str(i)), more)[0])
    for i, (n_tp, n_data, stage) in enumerate(cells):
        other = (i + 2) % len(cells)
        for rank, got in enumerate(run_ranks(n_tp * n_data, load_body, n_tp, stage, str(tmp_path / str(other)), more)):
            for name, value in saved[other][0].items():
                assert torch.equal(got[0][name], value), (cells[other], (n_tp, n_data, stage), rank, name)
            if cells[other][1] == n_data and precision == "fp32":  # the same samples
                torch.testing.assert_close(got[2], saved[other][2], rtol=1e-4, atol=0)
                for name, value in saved[other][1].items():
                    torch.testing.assert_close(got[1][name], value, rtol=1e-3, atol=1e-4)
