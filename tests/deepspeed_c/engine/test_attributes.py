"""Attributes, not methods, of DeepSpeed's engine, optimizers and parameters: ours have the values of the run."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.engine.attributes import ATTRIBUTES, OF_PIPELINES
from deepspeed_c.engine.offload import OffloadStateTypeEnum
from deepspeed_c.pipe import LayerSpec, PipelineModule
from deepspeed_c.zero.states.attributes import ATTRIBUTES as OF_OPTIMIZERS
from deepspeed_c.zero.states.attributes import OF_STAGE_3, OF_STAGES_1_AND_2, OF_STAGES_1_TO_3
from tests import training
from tests.ranks import on_ranks, run_ranks
from tests.toys import Chain, mean_square


class Words(Chain):
    """Has an attribute whose name DeepSpeed's engine has too, and an attribute whose name it does not have."""

    num_experts = 7
    n_layers = 2

    def __init__(self) -> None:
        super().__init__(end=mean_square, table=nn.Embedding(5, 4), head=nn.Linear(4, 3))


ZERO = {"stage3_param_persistence_threshold": 0}


def make(stage: int, **more: Any) -> Any:
    model = Words()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {**ZERO, "stage": stage}, **more}
    return deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "bf16": {"enabled": True}, "gradient_clipping": 0.5}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(1)
def test_every_row_answers(rank: int, world: int, stage: int) -> None:
    engine = make(stage, **ADAM)
    for name in ATTRIBUTES:
        getattr(engine, name)
    rows = {0: {}, 3: OF_STAGES_1_TO_3 | OF_STAGE_3}.get(stage, OF_STAGES_1_TO_3 | OF_STAGES_1_AND_2)
    for name in OF_OPTIMIZERS | rows:
        getattr(engine.optimizer, name)
    # Attributes of other stages are absent, as in DeepSpeed: programs ask with hasattr which optimizer they have.
    for name in (OF_STAGES_1_TO_3 | OF_STAGE_3 | OF_STAGES_1_AND_2).keys() - rows.keys() - OF_OPTIMIZERS.keys():
        assert not hasattr(engine.optimizer, name), name
    assert (engine.num_experts, engine.n_layers) == ([], 2), "DeepSpeed's engine hides the model's"
    assert not engine.has_moe_layers and not engine.pipeline_parallelism and engine.sparse_tensor_module_names == set()
    assert not hasattr(engine, "no_such_name") and not hasattr(engine.optimizer, "no_such_name")
    engine.destroy()


KEYS = {
    "reduce_bucket_size": 7777, "allgather_bucket_size": 8888, "overlap_comm": True, "reduce_scatter": False,
    "contiguous_gradients": False, "round_robin_gradients": True, "ignore_unused_parameters": False,
    "stage3_prefetch_bucket_size": 555, "sub_group_size": 6666, "stage3_param_persistence_threshold": 0,
}  # fmt: skip


@on_ranks(1)
def test_names_of_timers_are_those_that_the_engine_measures(rank: int, world: int) -> None:
    engine = make(1, **ADAM, wall_clock_breakdown=True)
    training.step(engine, torch.tensor([[1, 2], [3, 4]]))
    names, times = engine.engine_timers, engine.get_wall_clock_timers()
    print(names, times)
    assert names.step_timers == ["step_microstep", "step"] and len(names.active_timers()) == 10
    assert set(names.active_timers()) <= times.keys(), times.keys()
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(1)
def test_the_optimizer_answers_with_the_values_of_the_configuration(rank: int, world: int, stage: int) -> None:
    more = {**ADAM, "zero_optimization": {**KEYS, "stage": stage}, "prescale_gradients": True}
    more |= {"data_types": {"grad_accum_dtype": "fp32"}} if stage > 1 else {}
    engine = make(stage, **more, communication_data_type="fp32")
    optimizer = engine.optimizer
    for name in ("reduce_bucket_size", "reduce_scatter", "contiguous_gradients"):
        print(name, getattr(optimizer, name), KEYS[name])
        assert getattr(optimizer, name) == KEYS[name], name
    assert optimizer.communication_data_type is torch.float32 and not optimizer.postscale_gradients
    assert optimizer.gradient_accumulation_dtype is (torch.float32 if stage > 1 else torch.bfloat16)
    assert optimizer.master_weights_and_grads_dtype is torch.float32 and optimizer.dtype is torch.bfloat16
    if stage < 3:
        for name in ("overlap_comm", "allgather_bucket_size", "round_robin_gradients", "ignore_unused_parameters"):
            assert getattr(optimizer, name) == KEYS[name], name
        assert optimizer.partition_gradients is (stage == 2) and optimizer.zero_stage_string == f"ZeRO-{stage}"
        assert optimizer.real_dp_process_group == [optimizer.dp_process_group] and not optimizer.cpu_offload_pin_memory
    else:
        assert (optimizer.prefetch_elements, optimizer.sub_group_size) == (555, 6666)
        assert not optimizer.offload_param and not optimizer.swap_optimizer and optimizer.max_params_in_cpu == 0
    assert optimizer.offloaded_states == set()
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states])
    assert optimizer.offloaded_states == {OffloadStateTypeEnum.optim_states}
    engine.reload_states()
    assert optimizer.offloaded_states == set()
    # Megatron forks make these calls to the compression scheduler in each step.
    scheduler = engine.compression_scheduler
    assert not scheduler.weight_quantization_enabled and scheduler.training_steps == 0
    scheduler.step(step_zero_check=True)
    training.step(engine, torch.tensor([[1, 2], [3, 4]]))
    assert engine.compression_scheduler.training_steps == 1 and not any(engine.compression_scheduler.verbose.values())
    assert engine.mesh_device is None
    assert engine.engine_timers.active_timers() == engine.engine_timers.forward_timers == []
    engine.destroy()


def mesh_body(rank: int, world: int) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    model = Words()
    config = {"train_micro_batch_size_per_gpu": 2, **ADAM}
    engine = deepspeed_c.initialize(model=model, config=config, mesh_device=mesh)[0]
    assert engine.mesh_device is mesh
    engine.destroy()


def test_the_engine_answers_with_the_mesh_that_it_was_given():
    run_ranks(2, mesh_body)


def loaded_body(rank: int, world: int, folder: str) -> tuple[Any, ...]:
    """The engine's attributes about the loaded checkpoint, before and after the load. The engine's
    ``checkpoint_engine`` saves and loads a program's own file."""
    engine = make(2, **ADAM)
    before = engine.loaded_checkpoint_dp_world_size, engine.loaded_checkpoint_mp_world_size
    if world == 2:
        engine.save_checkpoint(folder, tag="two")
    engine.load_checkpoint(folder, tag="two")
    files = engine.checkpoint_engine
    assert files is engine.checkpoint_engine and not files.is_decoupled()
    path = os.path.join(folder, f"own{world}_{rank}.pt")
    files.save({"step": 3, "weight": torch.arange(5.0)}, path)
    back = files.load(path)
    assert back["step"] == 3 and back["weight"].tolist() == torch.load(path)["weight"].tolist() == [0, 1, 2, 3, 4]
    engine.destroy()
    return before, engine.loaded_checkpoint_dp_world_size, engine.loaded_checkpoint_mp_world_size


def test_ranks_of_the_run_that_saved_the_checkpoint(tmp_path):
    for world in (2, 1, 3):
        found = run_ranks(world, loaded_body, str(tmp_path))
        print(world, found)
        assert found == [((None, None), 2, 1)] * world


def pipeline_body(rank: int, world: int) -> None:
    parts = [LayerSpec(nn.Linear, 3, 3) for _ in range(2)]
    module = PipelineModule(parts, num_stages=2, loss_fn=nn.functional.mse_loss)
    config = {"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 3, "optimizer": ADAM["optimizer"]}
    engine, *_ = deepspeed_c.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    for name in (*ATTRIBUTES, *OF_PIPELINES):
        getattr(engine, name)
    assert (engine.micro_batches, engine.micro_batch_size, engine.loss_model) == (3, 5, nn.functional.mse_loss)
    assert engine.is_pipe_parallel and not engine.is_data_parallel and not engine.is_model_parallel
    assert (engine.prev_stage, engine.next_stage) == (rank - 1, rank + 1)
    engine.destroy()


def test_values_of_a_pipeline():
    run_ranks(2, pipeline_body)


@on_ranks(1)
def test_values_of_the_engine(rank: int, world: int) -> None:
    data = [torch.tensor([1, 2]) for _ in range(8)]
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 2, "sparse_gradients": True, "gradient_accumulation_steps": 2}
    engine, *_ = deepspeed_c.initialize(model=model, optimizer=optimizer, config=config, training_data=data)
    assert engine.client_optimizer is optimizer and engine.client_lr_scheduler is None
    assert engine.training_data is data and engine.collate_fn is None
    assert engine.param_names == {param: name for name, param in model.named_parameters()}
    assert engine.sparse_tensor_module_names == {"table.weight"}
    assert engine.dist_backend == torch.distributed.get_backend()
    tensors = [torch.ones(2), torch.zeros(3, 1)]
    flat = engine.flatten(tensors)
    assert flat.tolist() == [1, 1, 0, 0, 0]
    assert all(torch.equal(a, b) for a, b in zip(engine.unflatten(flat, tensors), tensors, strict=True))
    assert not engine.inside_no_sync_ctxt
    with engine.no_sync():
        assert engine.inside_no_sync_ctxt
    for step in range(4):
        training.step(engine, torch.tensor([1, 2]))
        assert engine.gas_boundary_ctr == (step + 1) // 2
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(1)
def test_values_of_the_optimizer(rank: int, world: int, stage: int) -> None:
    engine = make(stage, **ADAM)
    optimizer, model = engine.optimizer, engine.module
    assert (optimizer.dtype, optimizer.device, optimizer.clip_grad) == (torch.bfloat16, torch.device("cpu"), 0.5)
    assert optimizer.partition_count == [1] and not optimizer.cpu_offload and not optimizer.dynamic_loss_scale
    assert {id(p) for group in optimizer.bit16_groups for p in group} == {id(p) for p in model.parameters()}
    assert set(optimizer.param_names.values()) == {name for name, _ in model.named_parameters()}
    assert optimizer.loss_scaler.cur_scale == optimizer.loss_scaler.loss_scale == 1.0
    optimizer.set_lr(0.25)
    assert optimizer.get_lr() == 0.25 and engine.get_lr() == [0.25]
    engine.destroy()
    assert not hasattr(optimizer, "dtype"), "a closed one has no units to ask"


@on_ranks(1)
def test_the_loss_scaler_of_fp16(rank: int, world: int) -> None:
    more = {"optimizer": ADAM["optimizer"], "fp16": {"enabled": True, "initial_scale_power": 5}}
    engine = make(2, **more)
    scaler = engine.optimizer.loss_scaler
    assert (scaler.cur_scale, scaler.loss_scale, scaler.dynamic) == (32.0, 32.0, True)
    assert engine.optimizer.dynamic_loss_scale
    engine.destroy()


def gathered(rank: int, world: int) -> tuple[list[bool], list[bool]]:
    torch.manual_seed(0)
    plain = [param.detach().clone() for param in Words().parameters()]
    torch.manual_seed(0)
    engine = make(3, optimizer=ADAM["optimizer"])
    params = list(engine.module.parameters())
    params[0].all_gather_coalesced(params).wait()
    equal = [torch.equal(param.detach(), value) for param, value in zip(params, plain, strict=True)]
    params[0].partition(params)
    released = [param.ds_status.name == "NOT_AVAILABLE" for param in params]
    assert params[0].ds_secondary_tensor is params[0].nvme_swapper is None
    engine.destroy()
    return equal, released


def test_parameters_gather_together():
    for equal, released in run_ranks(2, gathered):
        assert all(equal) and all(released), (equal, released)
