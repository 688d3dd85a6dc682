"""Names of ``compat`` that need ranks or an engine: masters and gradients under DeepSpeed's names, batch sizes over
ranks, flat groups, and the folder of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import deepspeed_c
from deepspeed_c.compat.deepspeed_checkpoint import DeepSpeedCheckpoint, extract_zero_shards
from deepspeed_c.compat.ds_config import DeepSpeedConfig
from deepspeed_c.compat.fragments import (
    get_hp_fragment_mapping,
    lazy_init_hp_params_optimizer_state,
    link_hp_params,
    map_to_flat_opt_states,
)
from deepspeed_c.compat.hp_access import (
    fragment_address,
    get_full_hp_grad,
    get_full_hp_param,
    set_full_hp_grad,
    set_full_hp_param,
)
from deepspeed_c.compat.zero_files import parse_model_states, parse_optim_states
from deepspeed_c.errors import BatchSizeError, StateError
from deepspeed_c.utils import groups
from deepspeed_c.utils.runtime import all_gather_dp_groups, get_flattened_grad_norm, get_grad_zeros
from deepspeed_c.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_c.zero.weights.hooks import ModuleHooks
from tests import training
from tests.deepspeed_c.zero.traits import WIDTH, Mlp
from tests.ranks import on_ranks, run_ranks


def make_config(stage: int, **more: object) -> dict[str, object]:
    return training.config(
        stage, "Adam", zero={"stage3_param_persistence_threshold": 0}, rows=2, bf16={"enabled": True}, **more
    )


def loss_of(engine, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return engine(torch.randn(2, WIDTH, generator=generator).bfloat16(), torch.randn(2, 5, generator=generator))


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_masters_states_and_gradients(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    with deepspeed_c.initialize(model=Mlp(), config=make_config(stage))[0] as engine:
        param = engine.module.inp.weight
        with pytest.raises(StateError, match="before engine.step"):
            get_full_hp_grad(param)
        engine.backward(loss_of(engine, rank))
        grad = get_full_hp_grad(param)
        # All ranks have the same gradient, which covers the batches of all ranks.
        again = grad.clone()
        dist.broadcast(again, 0)
        assert torch.equal(grad, again) and grad.dtype == torch.float32 and grad.abs().max() > 0, (grad, again)
        set_full_hp_grad(param, torch.zeros_like(grad))
        assert torch.equal(get_full_hp_grad(param), torch.zeros_like(grad))
        before = get_full_hp_param(param)
        engine.step()
        # Adam moves no parameter if the gradient is 0 and there is no decay.
        assert torch.equal(get_full_hp_param(param), before)
        assert torch.equal(get_full_hp_param(param, "exp_avg"), torch.zeros_like(before))
        value = torch.arange(before.numel(), dtype=torch.float32).view_as(before) / 7
        set_full_hp_param(param, value)
        set_full_hp_param(param, value + 1, "exp_avg")
        assert torch.equal(get_full_hp_param(param), value)
        assert torch.equal(get_full_hp_param(param, optim_state_key="exp_avg"), value + 1)
        if stage == 3:
            assert isinstance(engine.optimizer.parameter_offload, ModuleHooks)
    with pytest.raises(StateError, match="an engine trains"):
        get_full_hp_param(torch.nn.Parameter(torch.ones(2)))


@on_ranks(2)
def test_parameters_tied_to_another_optimizer(rank: int, world: int) -> None:
    # Three parameters of 5, 4 and 3 elements are a flat group of 12, with 6 on each rank. The second parameter is cut
    # after its first element.
    params = [torch.nn.Parameter(torch.arange(n) * 1.0 + 10 * n).bfloat16() for n in (5, 4, 3)]
    whole = torch.cat([param.detach().flatten().float() for param in params])
    flat = whole[6 * rank : 6 * rank + 6].clone()
    gradients = {
        0: [torch.full((5,), 1.0), torch.full((1,), 2.0)]
        if rank == 0
        else [torch.full((3,), 2.0), torch.full((3,), 3.0)]
    }
    link_hp_params(params, flat, gradients, {}, False, 0, 6 * rank, 6, dist.group.WORLD)
    assert [param._hp_mapping is None for param in params] == [rank == 1, False, rank == 0]
    cut = params[1]._hp_mapping
    assert (cut.lp_fragment_address, cut.hp_fragment_address) == (
        (fragment_address(1, 0), fragment_address(1, 5))
        if rank == 0
        else (fragment_address(3, 1), fragment_address(3, 0))
    )
    for i, param in enumerate(params):
        assert torch.equal(param.get_full_hp_param(), param.detach().float()), i
        assert param.get_full_hp_grad().tolist() == [i + 1.0] * param.numel(), i
    state = {flat: {"exp_avg": flat * 2, "step": torch.tensor(3.0)}}
    lazy_init_hp_params_optimizer_state(params, flat, state)
    assert cut.get_optim_state_keys() == ["exp_avg"]
    assert torch.equal(params[1].get_full_hp_param("exp_avg"), params[1].detach().float() * 2)
    params[1].set_full_hp_param(torch.arange(4.0))
    assert params[1].get_full_hp_param().tolist() == [0, 1, 2, 3]
    assert flat[5] == 0 if rank == 0 else flat[:3].tolist() == [1, 2, 3], flat
    params[1].set_full_hp_grad(torch.arange(4.0) + 7)
    assert params[1].get_full_hp_grad().tolist() == [7, 8, 9, 10]
    cut.update_lp()
    cut.lp_fragment.add_(1)
    cut.update_hp()
    assert cut.hp_fragment.tolist() == ([1] if rank == 0 else [2, 3, 4])
    map_to_flat_opt_states(flat, params, state, ["exp_avg"])
    assert torch.equal(state[flat]["exp_avg"], whole[6 * rank : 6 * rank + 6] * 2)
    for wrong in (
        lambda: cut.get_hp_fragment("exp_avg_sq"),
        lambda: get_hp_fragment_mapping(params[0], 0, flat, {}, {}, False, 0, 6, 6),
    ):
        with pytest.raises(StateError):
            wrong()
    gradients.clear()
    with pytest.raises(StateError, match="no gradients"):
        params[1].get_full_hp_grad()


class SequenceMpu:
    def get_sequence_parallel_world_size(self) -> int:
        return 2


class DataMpu:
    def get_data_parallel_world_size(self) -> int:
        return 1


def config_body(rank: int, world: int) -> None:
    plain = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 3})
    assert (plain.world_size, plain.global_rank, plain.train_batch_size) == (2, rank, 6)
    assert (
        DeepSpeedConfig({"train_batch_size": 8, "gradient_accumulation_steps": 2}).train_micro_batch_size_per_gpu == 2
    )
    for mpu in (SequenceMpu(), DataMpu()):
        assert DeepSpeedConfig({"train_micro_batch_size_per_gpu": 3}, mpu=mpu).train_batch_size == 3
    sequence = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 3, "sequence_parallel_size": 2})
    assert (sequence.world_size, sequence.train_batch_size) == (1, 3)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "sequence_parallel"))
    assert DeepSpeedConfig({"train_micro_batch_size_per_gpu": 3}, mesh_device=mesh).train_batch_size == 6
    with pytest.raises(BatchSizeError, match="train_batch_size 7"):
        DeepSpeedConfig({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2})
    assert groups._get_zero_param_intra_parallel_group() is None
    assert groups._get_zero_param_intra_parallel_rank_in_mygroup() == rank
    assert groups._get_zero_param_intra_parallel_group_world_size() == 2
    assert groups._get_zero_param_intra_parallel_group_ranks() == [0, 1]


def test_batch_sizes_over_ranks() -> None:
    run_ranks(2, config_body)


class ModelMpu:
    """An mpu of two ranks that hold parts of one model."""

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()


@on_ranks(2)
def test_flat_groups_and_norms_over_ranks(rank: int, world: int) -> None:
    whole = [torch.full((6,), -1.0), torch.full((2,), -1.0)]
    parts = [list(flat.chunk(2)) for flat in whole]
    for group in parts:
        group[rank].copy_(torch.arange(group[rank].numel()) + 10.0 * rank)
    alone = [dist.new_group([each]) for each in range(world)][rank]
    single = torch.full((3,), 5.0)
    all_gather_dp_groups([*whole, single], [*parts, [single]], [dist.group.WORLD] * 2 + [alone], 2, 4)
    assert [flat.tolist() for flat in whole] == [[0, 1, 2, 10, 11, 12], [0, 10]]
    assert single.tolist() == [5, 5, 5]

    shared, cut = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))
    cut.model_parallel = True
    shared.grad, cut.grad = torch.tensor([0.0, 2.0, 0.0]), torch.tensor([3.0 * rank, 4.0])
    # Zeros of the shared parameter count only on the first rank: 2. The cut parameter has 1 zero on the first rank, and
    # none on the second.
    assert get_grad_zeros([shared, cut], mpu=ModelMpu()) == 3
    got = [get_flattened_grad_norm([cut], norm_type=p, mpu=ModelMpu()) for p in (2, float("inf"))]
    assert got == pytest.approx([(16 + 9 + 16) ** 0.5, 4.0]), got


def save_body(rank: int, world: int, folder: str) -> None:
    torch.manual_seed(0)
    config = make_config(2, checkpoint={"format": "deepspeed"})
    with deepspeed_c.initialize(model=Mlp(), config=config)[0] as engine:
        engine.backward(loss_of(engine, rank))
        engine.step()
        engine.save_checkpoint(folder, tag="t")


def test_folder_of_a_real_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, save_body, str(tmp_path))
    found = DeepSpeedCheckpoint(str(tmp_path / "t"))
    assert (found.dp_degree, found.tp_degree, found.pp_degree, found.world_size) == (2, 1, 1, 2)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="t")
    files = found.get_zero_files(0, 0, 0) + found.get_zero_files(0, 0, 1)
    stage, n_ranks, fp32 = parse_optim_states(files, str(tmp_path))
    assert (stage, n_ranks, len(fp32)) == (2, 2, 2)
    (model,) = parse_model_states(found.mp_rank_files)
    assert {name for shapes in model.param_shapes for name in shapes} == set(weights)

    # The shards are put together by hand and give the whole weights.
    out = tmp_path / "shards"
    for dp in range(2):
        extract_zero_shards(str(out), found, (0, 0, dp))
    for name, weight in weights.items():
        parts = [torch.load(path) for path in sorted((out / name / "0").glob("fp32.*"))]
        assert torch.equal(torch.cat(parts), weight.flatten()), name
        assert sum(torch.load(path).numel() for path in (out / name / "0").glob("exp_avg.*")) == weight.numel()
