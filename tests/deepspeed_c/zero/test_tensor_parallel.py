"""Models cut by hand over tensor-parallel ranks, at every stage. Weights, losses and norms equal those of the uncut
model in one plain torch process."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import deepspeed_c
from deepspeed_c.errors import CommError, ConfigError, RankMismatchError
from deepspeed_c.ops.muon import Muon
from deepspeed_c.utils import groups
from deepspeed_c.zero.layout.cuts import cut_of
from tests.deepspeed_c.zero.megatron import Mpu, Toy, batch
from tests.ranks import on_ranks, run_ranks
from tests.training import descend_together, update

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
            losses.append(update(engine, engine(*batch(step, micro, data_rank))))
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def logical(engine) -> dict[str, torch.Tensor]:
    """The fp32 masters of all trained parameters, put together from all ranks. Ranks that share an element must have
    the same value."""
    tp = engine._mesh.along("tp")
    found = {}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
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


def micro_losses(model: Toy, step: int, n_data: int, gas: int) -> Iterator[torch.Tensor]:
    """The parts of all ranks and micro-batches in the loss of a step."""
    for rank, micro in itertools.product(range(n_data), range(gas)):
        yield model(*batch(step, micro, rank)) / (n_data * gas)


def plain_muon(n_data: int, gas: int) -> dict[str, torch.Tensor]:
    """The weights of plain torch in one process, with whole matrices."""
    model = Toy()
    params = list(model.named_parameters())
    is_matrix = {name: p.dim() >= 2 and "embed" not in name and "lm_head" not in name for name, p in params}
    optimizer = Muon(
        [
            {"params": [p for name, p in params if is_matrix[name]], "use_muon": True, "lr": 3e-2},
            {"params": [p for name, p in params if not is_matrix[name]], "use_muon": False, "lr": 1e-2},
        ]
    )
    for step in range(STEPS):
        descend_together(optimizer, micro_losses(model, step, n_data, gas), 0.5)
    return {name: p.detach() for name, p in params}


def muon_body(rank: int, world: int, n_tp: int, folder: str):
    found = []
    for stage in (0, 1, 2, 3):
        config = make_config(stage, "Muon", gas=2, gradient_clipping=0.5)
        config["optimizer"]["params"] = {"muon_lr": 3e-2, "adam_lr": 1e-2}
        if n_tp == 3:  # parts of ranks differ in size, so their buckets end at different places
            config["zero_optimization"]["reduce_bucket_size"] = 100
        if stage == 2 and n_tp == 3:
            config["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
        with make_engine(n_tp, config) as engine:
            assert any(unit.n_buckets > 1 for unit in engine._optimizer.units if unit.has_parts)
            train(engine, 2)
            found.append(logical(engine))
    return found


@pytest.mark.parametrize(("n_tp", "n_data"), [(2, 1), (3, 1), (2, 2)])
def test_muon_orthogonalises_whole_matrices_of_which_ranks_hold_parts(tmp_path, n_tp: int, n_data: int) -> None:
    want = plain_muon(n_data, 2)
    for of_rank in run_ranks(n_tp * n_data, muon_body, n_tp, str(tmp_path)):
        for stage, got in enumerate(of_rank):
            for name, value in want.items():
                torch.testing.assert_close(got[name], value, rtol=2e-4, atol=5e-5, msg=lambda m: f"{stage=} {name} {m}")  # noqa: B023


def muon_saved_body(rank: int, world: int, n_tp: int, stage: int, folder: str):
    config = make_config(stage, "Muon")
    config["optimizer"]["params"] = {"muon_lr": 3e-2, "adam_lr": 1e-2}
    with make_engine(n_tp, config) as engine:
        if world > 1:
            train(engine, 1)
            engine.save_checkpoint(folder, "t")
        else:
            engine.load_checkpoint(folder)
        train(engine, 1, first=STEPS)
        return logical(engine)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_momentum_of_muon_loads_on_one_rank(tmp_path, stage: int) -> None:
    """Each of three ranks saves the momentum of its part. The load on one rank puts them together."""
    more, *_ = run_ranks(3, muon_saved_body, 3, stage, str(tmp_path))
    (loaded,) = run_ranks(1, muon_saved_body, 1, stage, str(tmp_path))
    for name, value in more.items():
        torch.testing.assert_close(loaded[name], value, rtol=2e-4, atol=5e-5, msg=lambda m: f"{name} {m}")  # noqa: B023


def plain(n_data: int, gas: int, clip: float, steps: int = STEPS) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(weights, norms) of one process of plain torch that sees all samples."""
    model = Toy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    norms = []
    for step in range(steps):
        norms.append(descend_together(optimizer, micro_losses(model, step, n_data, gas), clip))
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def parity_body(rank: int, world: int, n_tp: int, cells: list[tuple[int, int, float, dict]]):
    results = []
    for stage, gas, clip, more in cells:
        with make_engine(n_tp, make_config(stage, gas=gas, gradient_clipping=clip, **more)) as engine:
            assert engine.dp_world_size == world // n_tp and engine.train_batch_size() == 4 * gas * world // n_tp
            _, norms = train(engine, gas)
            results.append((logical(engine), norms))
    return results


def offload(device: str, **more) -> dict:
    return {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": device, **more}}}


CELLS = [(0, 1, 0.0, {}), (1, 2, 0.5, {}), (2, 1, 0.5, {}), (2, 2, 0.0, {"prescale_gradients": True}), (3, 2, 0.5, {})]
OFFLOADED = [(2, 2, 0.5, offload("cpu")), (2, 1, 0.5, offload("nvme"))]
MICS = {"zero_optimization": {"stage": 3, "mics_shard_size": 1, "stage3_param_persistence_threshold": 0}}


@pytest.mark.parametrize(
    ("n_tp", "n_data", "cells"),
    [(2, 1, CELLS), (3, 1, CELLS), (2, 2, [*CELLS, (3, 1, 0.5, MICS)]), (3, 1, OFFLOADED)],
    ids=["2 x 1", "3 x 1", "2 x 2", "offload"],
)
def test_parity_with_one_plain_process(tmp_path, n_tp: int, n_data: int, cells: list) -> None:
    cells = [
        (*cell[:3], {key: dict(value) if isinstance(value, dict) else value for key, value in cell[3].items()})
        for cell in cells
    ]
    for *_, more in cells:
        section = more.get("zero_optimization", {}).get("offload_optimizer", {})
        if section.get("device") == "nvme":
            more["zero_optimization"]["offload_optimizer"] = {**section, "nvme_path": str(tmp_path)}
    everyone = run_ranks(n_tp * n_data, parity_body, n_tp, cells)
    for i, (stage, gas, clip, _) in enumerate(cells):
        weights, norms = plain(n_data, gas, clip)
        for rank, of_rank in enumerate(everyone):
            got, got_norms = of_rank[i]
            torch.testing.assert_close(got_norms, norms, rtol=1e-5, atol=0, msg=f"{stage=} {rank=} {got_norms} {norms}")
            for name, value in weights.items():
                torch.testing.assert_close(got[name], value, rtol=2e-4, atol=2e-5, msg=lambda m: f"{stage=} {name} {m}")  # noqa: B023


def plain_bf16(gas: int, clip: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """(weights before, fp32 masters after, norms) of plain torch: products in bf16, sums and the step in fp32."""
    model = Toy().bfloat16()
    before = {name: p.detach().float() for name, p in Toy().named_parameters()}
    masters = {name: value.clone() for name, value in before.items()}
    optimizer = torch.optim.Adam(masters.values(), lr=3e-2)
    norms = []
    for step in range(STEPS):
        sums = {name: torch.zeros_like(value) for name, value in masters.items()}
        for micro in range(gas):
            model.zero_grad()
            (model(*batch(step, micro, 0)) / gas).backward()
            for name, p in model.named_parameters():
                sums[name] += p.grad.float()
        for name, value in masters.items():
            value.grad = sums[name]
        norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), clip).item())
        optimizer.step()
        for name, p in model.named_parameters():
            p.data.copy_(masters[name])
    return before, masters, norms


def test_parity_in_bf16() -> None:
    """The order and rounding of sums in bf16 differ, so the changes of a step agree within a few percent."""
    cells = [(stage, 2, 0.5, {"bf16": {"enabled": True}}) for stage in (1, 2, 3)]
    before, weights, norms = plain_bf16(2, 0.5)
    for of_rank in run_ranks(2, parity_body, 2, cells):
        for (stage, *_), (got, got_norms) in zip(cells, of_rank, strict=True):
            torch.testing.assert_close(got_norms, norms, rtol=2e-2, atol=0, msg=f"{stage=} {got_norms} {norms}")
            for name, value in weights.items():
                moved = (value - before[name]).norm()
                apart = (got[name] - value).norm()
                assert apart < 0.1 * moved, (stage, name, apart, moved)


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


# (tensor-parallel ranks, data-parallel ranks, stage). Each arrangement saves, and each loads.
ARRANGEMENTS = [(1, 1, 0), (2, 1, 1), (3, 1, 2), (2, 2, 3), (1, 2, 2)]


@pytest.mark.always  # the one test that finds wrong places of ranks in the mesh (scripts/mutations.py)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_loads_on_any_arrangement(tmp_path, precision: str) -> None:
    """Loaded values equal the saved ones bit for bit, and training goes on as it would have."""
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


def lamb_body(rank: int, world: int, n_tp: int, stage: int):
    with make_engine(n_tp, make_config(stage, "Lamb", gradient_clipping=0.5)) as engine:
        _, norms = train(engine, 1)
        return logical(engine), norms


def test_ratios_of_lamb_are_those_of_logical_tensors() -> None:
    (weights, norms), *_ = run_ranks(1, lamb_body, 1, 0)
    for n_tp, stage in ((2, 0), (3, 1), (2, 3)):
        for got, got_norms in run_ranks(n_tp, lamb_body, n_tp, stage):
            torch.testing.assert_close(got_norms, norms, rtol=1e-5, atol=0)
            for name, value in weights.items():
                torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=lambda m: f"{stage=} {name} {m}")  # noqa: B023


def overflow_body(rank: int, world: int, stage: int):
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    with make_engine(2, make_config(stage, **fp16)) as engine:
        train(engine, 1, 1)
        before, scale = logical(engine), engine.optimizer.loss_scale
        loss = engine(*batch(5, 0, 0))
        if rank == 1:  # no other rank has a part of this parameter
            engine.module.up.weight.register_hook(lambda grad: torch.full_like(grad, torch.inf))
        update(engine, loss)
        same = all(torch.equal(before[name], value) for name, value in logical(engine).items())
        return engine.skipped_steps, same, engine.optimizer.loss_scale / scale


@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_on_one_rank_skips_the_step_of_all(stage: int) -> None:
    assert run_ranks(2, overflow_body, stage) == [(1, True, 0.5)] * 2


def drift_body(rank: int, world: int, kind: str, stage: int) -> str:
    with make_engine(2, make_config(stage)) as engine:
        train(engine, 1, 1)
        # Nothing that is computed with comes before this parameter, so no gradient shows the difference first.
        name = "words.weight" if kind == "gradient" else "out.weight"
        param = dict(engine.module.named_parameters())[name]
        if rank == 1 and kind == "gradient":
            param.register_hook(lambda grad: grad + 1e-6)
        elif rank == 1:
            value = deepspeed_c.utils.safe_get_full_fp32_param(param)
            value[1, 1] = torch.nextafter(value[1, 1], torch.tensor(9.0))
            deepspeed_c.utils.safe_set_full_fp32_param(param, value)
        with pytest.raises(RankMismatchError) as raised:
            train(engine, 1, 2)
        return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "stage", "said"),
    [
        ("gradient", 2, "gradients of words.weight differ on ranks 0 and 1"),
        ("weight", 1, "weights of out.weight differ on ranks 0 and 1"),
    ],
)
def test_whole_parameters_that_drift_are_named(kind: str, stage: int, said: str) -> None:
    for text in run_ranks(2, drift_body, kind, stage):
        assert said in text, text


def inputs_body(rank: int, world: int) -> str:
    with make_engine(2, make_config(1)) as engine:
        ids, labels = batch(0, 0, 0)
        if rank == 3:
            labels = labels.roll(1)
        with pytest.raises(RankMismatchError) as raised:
            engine(ids, labels=labels)
        return str(raised.value)


def test_other_data_on_one_rank_is_said_on_all() -> None:
    for text in run_ranks(4, inputs_body):
        assert re.search(r"ranks 2 and 3 .*argument 'labels' int64 \(4, 5\) #\w+ and argument 'labels'", text), text


def export_body(rank: int, world: int, stage: int, folder: str):
    with make_engine(2, make_config(stage)) as engine:
        train(engine, 1, 1)
        engine.save_16bit_model(folder, "whole.safetensors")
        engine.save_model(folder + "/hf")
        state = engine.module_state_dict()
        engine.load_module_state_dict({name: value + 1 for name, value in state.items()})
        return logical(engine), state


@pytest.mark.parametrize("stage", [2, 3])
def test_exports_have_whole_tensors(tmp_path, stage: int) -> None:
    everyone = run_ranks(4, export_body, stage, str(tmp_path))
    one, hf = load_file(tmp_path / "whole.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    for after, state in everyone:
        assert one.keys() == hf.keys() == state.keys() == after.keys()
        for name, value in state.items():
            assert torch.equal(one[name], value) and torch.equal(hf[name], value), name
            assert torch.equal(after[name], value + 1), name


@on_ranks(4)
def test_ranks_from_an_mpu_and_a_device_mesh(rank: int, world: int) -> None:
    for leaves_out in (
        ("get_tensor_model_parallel_rank",),
        ("get_tensor_model_parallel_world_size", "get_data_parallel_rank"),
        ("get_tensor_model_parallel_group", "get_data_parallel_world_size", "get_pipeline_model_parallel_world_size"),
    ):
        mpu = Mpu(2, leaves_out)
        with deepspeed_c.initialize(model=Toy(), config=make_config(1), mpu=mpu)[0] as engine:
            assert str(engine._mesh) == "dp_shard 2 x tp 2" and engine.mp_world_size == 2 == engine.dp_world_size
            assert groups.get_tensor_model_parallel_rank() == rank % 2 == groups.get_model_parallel_rank()
            assert groups.get_data_parallel_rank() == rank // 2
            assert groups._get_broadcast_src_rank() == rank % 2
            assert groups.get_tensor_model_parallel_src_rank() == rank - rank % 2
            assert dist.get_process_group_ranks(groups.get_tensor_model_parallel_group()) == [rank - rank % 2, rank | 1]
            assert dist.get_process_group_ranks(groups.get_data_parallel_group()) == [rank % 2, rank % 2 + 2]
            groups.set_tensor_model_parallel_world_size(2)
            loader = engine.deepspeed_io(list(range(32)), route="eval")
            assert next(iter(loader)).tolist() == [4 * 0 + 2 * i + rank // 2 for i in range(4)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with deepspeed_c.initialize(model=Toy(), config=make_config(1), mesh_device=mesh)[0] as engine:
        assert str(engine._mesh) == "dp_shard 2 x tp 2"
    for mpu, said in (
        (
            Mpu(2, ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_group")),
            "none of get_tensor_model_parallel_rank",
        ),
        (Mpu(4, ("get_data_parallel_world_size", "get_data_parallel_group")), "none of .*get_data_parallel_world_size"),
    ):
        with pytest.raises(CommError, match=said):
            deepspeed_c.initialize(model=Toy(), config=make_config(1), mpu=mpu)
    with pytest.raises(ConfigError, match=r"autotp_size: 4 ranks cannot be cut into groups of 3"):
        deepspeed_c.initialize(model=Toy(), config=make_config(1, tensor_parallel={"autotp_size": 3}))
