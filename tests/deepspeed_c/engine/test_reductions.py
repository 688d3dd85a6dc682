"""The engine's methods that reduce gradients and other tensors by hand, the names of the engine's groups, and the
throughput timer."""

import pytest
import torch
import torch.distributed as dist

import deepspeed_c
from deepspeed_c.errors import MissingNameError
from deepspeed_c.utils import groups, safe_get_full_grad
from tests import training
from tests.ranks import on_ranks

WIDTH = 6


def make(stage=1, mpu=None, **keys):
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    config = training.config(stage, lr=0.5, gradient_clipping=0.0, **keys)
    return deepspeed_c.initialize(model=model, config=config, mpu=mpu)[0], model


def gradient_of(rank, k):
    return torch.full((WIDTH, WIDTH), float(rank + 1) * k)


def backward(engine, rank, k=1.0):
    """The gradient of each weight is (rank + 1) * k."""
    engine.backward(engine(torch.full((1, WIDTH), float(rank + 1) * k)).sum())


def safe_weights(model, stage):
    if stage < 3:
        return model.weight.detach().clone()
    with deepspeed_c.zero.GatheredParameters(model.weight):
        return model.weight.detach().clone()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_gradients_are_completed_once_where_somebody_asks(rank, world, stage):
    engine, model = make(stage)
    engine.allreduce_gradients()  # no gradients have accumulated: nothing to do
    weights = safe_weights(model, stage)
    with engine.no_sync():
        backward(engine, rank)
        engine._backward_epilogue()  # within no_sync nothing is reduced
        assert engine._optimizer.reducer.facts is None
    engine.allreduce_gradients()
    mean = sum(range(1, world + 1)) / world
    grad = safe_get_full_grad(model.weight)
    assert torch.equal(grad, torch.full_like(grad, mean)), (grad, mean)
    sent = dict(engine._comm.ledger.totals)
    engine.allreduce_gradients(bucket_size=3)
    engine._backward_epilogue()
    engine.buffered_allreduce_fallback()
    assert dict(engine._comm.ledger.totals) == sent, "sums that are complete were reduced again"
    # Another pass of the same window counts too.
    engine._backward_prologue()
    backward(engine, rank, 2.0)
    engine._backward_epilogue()
    grad = safe_get_full_grad(model.weight)
    assert torch.allclose(grad, torch.full_like(grad, 3 * mean)), (grad, 3 * mean)
    engine.step()
    got = safe_weights(model, stage)
    assert torch.allclose(got, weights - 0.5 * 3 * mean), (got, weights)
    engine.close()


@on_ranks(2)
def test_within_a_window_nothing_is_sent(rank, world):
    """Within a window, at stage 1, nothing is sent; at its end everything is."""
    engine, model = make(1, gradient_accumulation_steps=2)
    backward(engine, rank)
    sent = dict(engine._comm.ledger.totals)
    engine.allreduce_gradients()
    assert dict(engine._comm.ledger.totals) == sent and safe_get_full_grad(model.weight) is None
    engine.step()
    backward(engine, rank)
    engine.allreduce_gradients()
    mean = sum(range(1, world + 1)) / world
    grad = safe_get_full_grad(model.weight)
    assert torch.allclose(grad, torch.full_like(grad, mean)), (grad, mean)
    engine.step()
    engine.close()


SETTINGS = {
    "mean": ({}, lambda mean, total: mean),
    "sum": ({"gradient_allreduce_op": "sum"}, lambda mean, total: total),
    "prescaled": ({"prescale_gradients": True}, lambda mean, total: mean),
    "predivided": ({"gradient_predivide_factor": 4.0}, lambda mean, total: mean),
    "in bf16": ({"communication_data_type": "bf16"}, lambda mean, total: mean),
}


@on_ranks(2)
def test_other_tensors(rank, world):
    total = sum(r + 1.0 for r in range(world))
    for name, (keys, expected) in SETTINGS.items():
        engine, _ = make(1, **keys)
        want = expected(total / world, total)
        bucket = [torch.full((3, 5), rank + 1.0), torch.full((), 10 * (rank + 1.0)), torch.full((2,), -rank - 1.0)]
        before = [tensor.clone() for tensor in bucket]
        flat = engine.allreduce_bucket(bucket, engine.data_parallel_group)
        assert flat.dtype == torch.float32 and flat.shape == (18,)
        assert flat.tolist() == [want] * 15 + [10 * want] + [-want] * 2, (name, flat, want)
        assert all(torch.equal(a, b) for a, b in zip(bucket, before)), name
        engine.allreduce_no_retain(bucket, engine.data_parallel_group, numel_per_bucket=10)
        assert bucket[0].tolist() == [[want] * 5] * 3 and float(bucket[1]) == 10 * want, (name, bucket)
        halves = [torch.full((4,), rank + 1.0, dtype=torch.float16), torch.full((2, 2), rank + 1.0)]
        engine.buffered_allreduce_fallback(halves)
        assert all(tensor.float().unique().tolist() == [want] for tensor in halves), (name, halves)
        assert [t.dtype for t in halves] == [torch.float16, torch.float32]
        if name == "mean":
            doubled = engine.allreduce_bucket([torch.ones(2)], None, dp_world_size=world * 2)
            assert doubled.tolist() == [0.5, 0.5], doubled
            values = engine.all_gather_scalar(torch.tensor([rank]), None)
            assert [int(value) for value in values] == list(range(world)), values
            with pytest.raises(MissingNameError, match="sparse_allreduce"):
                engine.sparse_allreduce(None, None)
        engine.close()


class Mpu:
    def __init__(self, group):
        self.group = group

    def get_data_parallel_group(self):
        return self.group

    def get_model_parallel_world_size(self):
        return 1


@on_ranks(3, fresh=True)
def test_the_groups(rank, world):
    engine, _ = make(1)
    assert engine.mpu is None and engine.data_parallel_group is dist.group.WORLD
    assert engine.seq_data_parallel_group is dist.group.WORLD
    assert (engine.seq_dp_world_size, engine.mp_world_size, engine.sequence_parallel_size) == (world, 1, 1)
    engine.close()
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    mpu = Mpu(pairs[rank // 2])
    engine, _ = make(1, mpu=mpu)
    assert engine.mpu is mpu and engine.data_parallel_group is mpu.group
    assert engine.seq_dp_world_size == engine.dp_world_size == (2 if rank < 2 else 1)
    engine.close()
    groups.initialize(mpu=None)


@on_ranks(2)
def test_the_throughput_timer(rank, world):
    engine, _ = make(1, gradient_accumulation_steps=2)
    assert engine._tput_timer is None, "a timer runs that nobody has asked for"
    timer = engine.tput_timer
    assert timer is engine.tput_timer and timer.batch_size == engine.train_batch_size() == 2 * world
    for _ in range(2 * 5):
        backward(engine, rank)
        engine.step()
    assert (timer.global_step_count, timer.micro_step_count) == (5, 10)
    rate, elapsed = timer.avg_samples_per_sec(), timer.total_elapsed_time
    assert elapsed > 0 and rate == pytest.approx(3 * timer.batch_size / elapsed), (rate, elapsed)  # 2 steps warm up
    engine.eval()
    engine(torch.ones(1, WIDTH))
    assert not timer.started, "an evaluation counts as a step"
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)
    engine.close()
