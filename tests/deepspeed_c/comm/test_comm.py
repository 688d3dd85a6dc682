"""comm/comm.py: every operation has DeepSpeed's name and the result of torch's operation, and the communication log
counts it."""

from __future__ import annotations

import inspect
import itertools
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepspeed_c import comm
from deepspeed_c.comm import comm as comm_module
from deepspeed_c.comm.comm import comms_logger
from deepspeed_c.errors import CommError
from tests.ranks import on_ranks

INIT_DISTRIBUTED = (
    "dist_backend auto_mpi_discovery distributed_port verbose timeout init_method dist_init_required config rank"
    " world_size"
)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("broadcast", "tensor src group async_op prof log_name debug"),
        ("broadcast_object_list", "object_list src group device"),
        ("all_gather", "tensor_list tensor group async_op prof log_name debug"),
        ("all_gather_object", "object_list obj group prof log_name debug"),
        ("reduce_scatter_fn", "output_tensor tensor op group async_op prof debug"),
        ("reduce_scatter_tensor", "output_tensor tensor op group async_op prof log_name debug"),
        ("all_gather_into_tensor", "output_tensor tensor group async_op prof log_name debug"),
        ("allgather_fn", "output_tensor input_tensor group async_op debug"),
        ("all_to_all_single", "output tensor output_split_sizes input_split_sizes group async_op prof log_name debug"),
        ("all_to_all", "output_tensor_list input_tensor_list group async_op"),
        ("send", "tensor dst group tag prof log_name debug"),
        ("recv", "tensor src group tag prof log_name debug"),
        ("isend", "tensor dst group tag prof log_name debug"),
        ("irecv", "tensor src group tag prof log_name debug"),
        ("gather", "tensor gather_list dst group async_op prof log_name debug"),
        ("scatter", "tensor scatter_list src group async_op prof log_name debug"),
        ("barrier", "group async_op device_ids prof log_name debug"),
        ("monitored_barrier", "group timeout wait_all_ranks prof log_name debug"),
        ("reduce", "tensor dst op group async_op prof log_name debug"),
        ("reduce_scatter", "output input_list op group async_op prof log_name debug"),
        ("all_reduce", "tensor op group async_op prof log_name debug"),
        ("inference_all_reduce", "tensor op group async_op prof log_name debug"),
        ("all_reduce_coalesced", "tensors op group async_op prof log_name debug"),
        ("all_gather_coalesced", "output_tensors input_tensors group async_op"),
        ("log_summary", "show_straggler return_dict"),
        ("configure", "deepspeed_config enabled prof_all prof_ops verbose debug"),
        ("init_distributed", INIT_DISTRIBUTED),
        ("new_group", "ranks timeout"),
        ("get_world_size", "group"),
        ("get_rank", "group"),
        ("get_global_rank", "group group_rank"),
        ("get_all_ranks_from_group", "group"),
        ("destroy_process_group", "group"),
        ("initialize_mesh_device", "mesh_shape mesh_dim_names"),
        ("mpi_discovery", "distributed_port verbose"),
        ("init_deepspeed_backend", "ds_backend timeout init_method"),
        ("patch_aml_env_for_torch_nccl_backend", "master_port verbose"),
        ("patch_aws_sm_env_for_torch_nccl_backend", "verbose"),
    ],
)
def test_signatures_are_deepspeeds(name, parameters):
    """Functions have the parameter names of deepspeed.comm.comm in DeepSpeed 0.19.6, in the same order. (Our new_group
    also takes a timeout.)"""
    assert list(inspect.signature(getattr(comm, name)).parameters) == parameters.split()
    assert name in comm.comm.__all__ + comm.groups.__all__


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_every_operation(rank, world):
    def t(*values):
        return torch.tensor([float(v) for v in values])

    x = t(rank + 1)
    comm.all_reduce(x)
    total = world * (world + 1) / 2
    assert x.item() == total
    x = t(rank + 1)
    handle = comm.all_reduce(x, op=comm.ReduceOp.MAX, async_op=True)
    handle.wait()
    assert x.item() == world
    x = t(rank + 1)
    comm.inference_all_reduce(x)
    assert x.item() == total
    xs = [t(rank + 1), t(rank, rank)]
    comm.all_reduce_coalesced(xs)
    assert xs[0].item() == total and xs[1].tolist() == [total - world] * 2
    x = t(rank)
    comm.broadcast(x, world - 1)
    assert x.item() == world - 1
    objects = [{"from": rank}]
    comm.broadcast_object_list(objects, src=0)
    assert objects == [{"from": 0}]
    x = t(rank + 1)
    comm.reduce(x, 0)
    assert rank != 0 or x.item() == total
    parts = [t(0) for _ in range(world)] if rank == 0 else None
    comm.gather(t(rank), parts, dst=0)
    assert rank != 0 or [p.item() for p in parts] == list(range(world))
    x = t(-1)
    comm.scatter(x, [t(r * 10) for r in range(world)] if rank == 0 else None, src=0)
    assert x.item() == rank * 10
    parts = [t(0, 0) for _ in range(world)]
    comm.all_gather(parts, t(rank, rank))
    assert [p.tolist() for p in parts] == [[r, r] for r in range(world)]
    for gather in (comm.all_gather_into_tensor, comm.allgather_fn):
        whole = torch.zeros(world)
        gather(whole, t(rank))
        assert whole.tolist() == list(range(world))
    outs = [torch.zeros(world), torch.zeros(2 * world)]
    comm.all_gather_coalesced(outs, [t(rank), t(rank, rank)], async_op=True).wait()
    assert outs[0].tolist() == list(range(world)) and outs[1].tolist() == [r for r in range(world) for _ in range(2)]
    values = [None] * world
    comm.all_gather_object(values, rank)
    assert values == list(range(world))
    for scatter in (comm.reduce_scatter_tensor, comm.reduce_scatter_fn):
        out = t(0)
        scatter(out, torch.arange(world, dtype=torch.float32))
        assert out.item() == world * rank
    out = t(0)
    comm.reduce_scatter(out, [t(r) for r in range(world)])
    assert out.item() == world * rank
    out = torch.zeros(world)
    comm.all_to_all_single(out, t(*[10 * rank + r for r in range(world)]))
    assert out.tolist() == [10 * r + rank for r in range(world)]
    out = torch.zeros(world * (rank + 1))
    comm.all_to_all_single(
        out, torch.full((world * (world + 1) // 2,), float(rank)), [rank + 1] * world, list(range(1, world + 1))
    )
    assert out.tolist() == [float(r) for r in range(world) for _ in range(rank + 1)]
    outs = [torch.zeros(rank) for _ in range(world)]  # rank 0 gets nothing
    comm.all_to_all(outs, [torch.full((r,), float(rank)) for r in range(world)])
    assert [o.tolist() for o in outs] == [[float(r)] * rank for r in range(world)]
    if world > 1 and rank < 2:
        if rank == 0:
            comm.send(t(5), 1)
            comm.isend(t(6), 1, tag=3).wait()
        else:
            x = t(0)
            assert comm.recv(x, 0) == 0 and x.item() == 5
            comm.irecv(x, 0, tag=3).wait()
            assert x.item() == 6
    comm.barrier()
    comm.monitored_barrier(timeout=timedelta(seconds=20))
    assert comm.has_all_gather_into_tensor() and comm.has_reduce_scatter_tensor() and comm.has_all_reduce_coalesced()
    assert isinstance(comm.has_coalescing_manager(), bool)
    assert comm.get_world_size() == world and comm.get_rank() == rank and comm.get_world_group() is dist.group.WORLD
    group = comm.new_group([world - 1])
    assert comm.get_rank(group) == (0 if rank == world - 1 else -1)
    if rank == world - 1:
        assert comm.get_global_rank(group, 0) == world - 1 and comm.get_all_ranks_from_group(group) == [world - 1]
    assert comm.get_all_ranks_from_group() == list(range(world))


@on_ranks(2, fresh=True)
def test_errors_are_typed(rank, world):
    with pytest.raises(CommError, match="all_to_all_single failed") as caught:
        comm.all_to_all_single(torch.zeros(2), torch.zeros(2), [1, 2], [1, 1])
    assert isinstance(caught.value, RuntimeError) and caught.value.where == f"rank {rank}"
    with pytest.raises(ValueError, match="1 output tensors for 2"):
        comm.all_gather_coalesced([torch.zeros(2)], [torch.zeros(1)] * 2)
    with pytest.raises(CommError, match="carrier"):
        comm.init_deepspeed_backend("carrier")
    comm.init_deepspeed_backend("gloo", None, None)
    comm.set_backend()
    if rank == 0:
        with pytest.raises(CommError, match="monitored_barrier failed.*[Rr]ank.* 1"):
            comm.monitored_barrier(timeout=timedelta(seconds=1))


@on_ranks(2, fresh=True)
def test_the_log(rank, world):
    assert not comm.has_comm_data()
    comm.all_reduce(torch.zeros(256))
    assert comm.get_comm_operation_count() == 0, "recorded while off"
    comm.configure({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["mine"]}})
    comm.all_reduce(torch.zeros(256))
    comm.all_reduce(torch.zeros(256), log_name="mine")
    comm.all_reduce(torch.zeros(256), prof=True)
    assert sorted(comm.get_logged_comm_ops()) == ["all_reduce", "mine"] and comm.get_comm_operation_count() == 2
    comm.reset_log()
    assert not comm.has_comm_data()
    comm.configure(prof_all=True)
    for _ in range(3):
        comm.all_reduce(torch.zeros(256))
    handle = comm.all_reduce(torch.zeros(1000), async_op=True)
    assert comm.get_comm_operation_count() == 3, "an asynchronous call was recorded before it was waited for"
    handle.wait()
    handle.wait()
    comm.all_gather([torch.zeros(4) for _ in range(world)], torch.zeros(4))
    # Each reading of this clock advances it, by 2 s on rank 0 and by 0.5 s on rank 1. So rank 0 seems to wait for rank
    # 1.
    readings = itertools.count(step=(2.0, 0.5)[rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_module, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
        comm.barrier()
    if rank == 0:
        comm.send(torch.zeros(3), 1)  # only one rank records this
    else:
        comm.recv(torch.zeros(3), 0)
    result = comm.log_summary(show_straggler=True, return_dict=True)
    row = result["summary"]["all_reduce"][1024]
    assert row["count"] == 3 and row["msg_size_bytes"] == 1024 and row["msg_size_str"] == "1.0 KB"
    assert row["total_latency_ms"] > 0 and row["avg_latency_ms"] > 0
    assert result["summary"]["all_reduce"][4000]["count"] == 1
    assert result["metadata"]["world_size"] == world and result["metadata"]["rank"] == rank
    waited = result["straggler_analysis"]["barrier"][0]
    assert waited["count"] == 1
    # Rank 1 came late: its barrier was the fastest, and rank 0 waited.
    assert waited["total_straggler_ms"] == pytest.approx(1500.0 * (rank == 0)), waited
    own = "send" if rank == 0 else "recv"
    assert result["straggler_analysis"][own][12]["count"] == 0
    assert comm.log_summary() is None
    comm.reset_log()
    comm.configure(debug=True)
    comm.all_reduce(torch.zeros(1))
    assert comm.get_logged_comm_ops() == ["all_reduce | [Caller Func: test_the_log]"]
    comm.configure(enabled=False, debug=False)
    comm.reset_log()


def test_the_log_is_off_by_default():
    assert not comms_logger.enabled and not comms_logger.has_data()


def test_cloud_environments(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    assert not (comm.in_aml() or comm.in_aws_sm() or comm.in_dlts())
    with pytest.raises(CommError, match="OMPI_COMM_WORLD_RANK is not set"):
        comm.patch_aws_sm_env_for_torch_nccl_backend()
    for name, value in {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    monkeypatch.setenv("AZ_BATCH_MASTER_NODE", "10.0.0.4:6000")
    monkeypatch.setenv("AZUREML_EXPERIMENT_ID", "1")
    assert comm.in_aml()
    comm.patch_aml_env_for_torch_nccl_backend(verbose=False)
    import os

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[n] for n in names] == ["3", "4", "1", "10.0.0.4", "6000"]
