"""Engines whose ranks share memory ("comm": {"local": ...}) get the same bits as over gloo and read buffers in place.
Loaders that fork, checkpoints and killed ranks are tested too."""

from __future__ import annotations

import copy
import io
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import deepspeed_c
from deepspeed_c.comm.ledger import all_ledgers
from deepspeed_c.errors import CommError, ConfigError
from tests import training
from tests.ranks import RanksFailed, on_ranks
from tests.toys import Stack, mean_square

WIDTH, STEPS = 24, 3
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


def make_model():
    torch.manual_seed(0)
    return Stack(5, lambda: torch.nn.Linear(WIDTH, WIDTH), lambda y: mean_square(torch.tanh(y)))


def config(local, stage, precision="fp32", **more):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 700, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": zero, **PRECISIONS[precision],
        **({} if local is None else {"comm": {"local": local}}), **more,
    }  # fmt: skip


def start(settings):
    return deepspeed_c.initialize(model=make_model(), config=settings)[0]


def step(engine, rank, seed):
    dtype = next(engine.module.parameters()).dtype
    for micro in range(2):
        generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + micro)
        training.step(engine, torch.randn(3, WIDTH, generator=generator).to(dtype))


def weights(engine):
    if engine.zero_optimization_stage() < 3:
        return [p.detach().clone() for p in engine.module.parameters()]
    with deepspeed_c.zero.GatheredParameters(list(engine.module.parameters())):
        return [p.detach().clone() for p in engine.module.parameters()]


def trained(rank, settings, n_steps=STEPS):
    with start(settings) as engine:
        for i in range(n_steps):
            step(engine, rank, i)
        return weights(engine), engine.get_global_grad_norm()


def bits_body(rank, world, stage, precision, more):
    for book in all_ledgers():
        book.reset_totals()
    by_gloo = trained(rank, config("off", stage, precision, **copy.deepcopy(more)))
    carried = {path for book in all_ledgers() for path in book.carried}
    assert carried == {"gloo"}, carried
    for local in ("shm", "auto", None):
        for book in all_ledgers():
            book.reset_totals()
        shared = trained(rank, config(local, stage, precision, **copy.deepcopy(more)))
        for a, b in zip(by_gloo[0], shared[0], strict=True):
            assert torch.equal(a, b), f"{local}: off by {(a - b).abs().max().item():g}"
        assert abs(by_gloo[1] - shared[1]) <= 1e-12 * by_gloo[1]
        bytes_of = {}
        for book in all_ledgers():
            for path, n_bytes in book.carried.items():
                bytes_of[path] = bytes_of.get(path, 0) + n_bytes
        # Ranks compare their configurations, a few numbers, over gloo before they know that they share memory.
        assert bytes_of["shm"] > 20_000 and bytes_of.get("gloo", 0) < 4000, bytes_of


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_get_the_bits_of_gloo(run_ranks, stage, precision):
    run_ranks(2, bits_body, stage, precision, {})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_three_ranks_get_the_bits_of_gloo(run_ranks, stage):
    # At stage 0 gloo's ring adds fp32 in another order than shared memory.
    run_ranks(3, bits_body, stage, "fp32", {})


def test_groups_of_a_mesh_share_memory_too(run_ranks):
    run_ranks(4, bits_body, 3, "fp32", {"zero": {"mics_shard_size": 2}})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_what_is_sent_lies_where_others_read_it(rank, world, stage):
    with start(config("auto", stage)) as engine:
        optimizer = engine._optimizer
        owns = optimizer.comm.transport_of(torch.empty(1)).owns
        seen = set()
        reduce = optimizer.comm.reduce_scatter if stage else optimizer.comm.all_reduce

        def watched(flat, *args, **kwargs):
            seen.add(owns(flat))
            return reduce(flat, *args, **kwargs)

        setattr(optimizer.comm, "reduce_scatter" if stage else "all_reduce", watched)
        for i in range(2):
            step(engine, rank, i)
        assert seen == {True}, "gradients are read where they gather"
        if stage == 3:
            with deepspeed_c.zero.GatheredParameters(list(engine.module.parameters())):
                assert all(owns(p.data) for p in engine.module.parameters())
        else:
            assert all(owns(p.data) for p in engine.module.parameters())


class Samples(torch.utils.data.Dataset):
    def __init__(self, model):
        self.model = model  # a forked worker holds the model too, and releases it

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((WIDTH,), float(i)) / 12


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_loaders_that_fork_and_checkpoints(rank, world, stage, folder):
    with start(config("auto", stage)) as engine:
        step(engine, rank, 0)
        before = weights(engine)
        for _ in range(2):
            loader = torch.utils.data.DataLoader(
                Samples(engine.module), batch_size=3, num_workers=2, multiprocessing_context="fork"
            )
            assert sum(len(batch) for batch in loader) == 12
        assert all(map(torch.equal, before, weights(engine))), "a worker that ends has taken nothing along"
        for batch in torch.utils.data.DataLoader(
            Samples(engine.module), batch_size=1, num_workers=2, multiprocessing_context="fork"
        ):
            training.step(engine, batch)
        # Copy the module in memory and through a file.
        if stage < 3:
            twin = copy.deepcopy(engine.module)
            file = io.BytesIO()
            torch.save(engine.module.state_dict(), file)
            file.seek(0)
            states = torch.load(file)
            for name, p in engine.module.named_parameters():
                assert torch.equal(states[name], p) and torch.equal(twin.get_parameter(name), p)
        engine.save_checkpoint(folder, tag="one")
        saved = weights(engine)
        step(engine, rank, 5)
        after = weights(engine)
        engine.load_checkpoint(folder, tag="one")
        assert all(map(torch.equal, saved, weights(engine)))
        step(engine, rank, 5)
        assert all(map(torch.equal, after, weights(engine))), "the same steps give the same weights"
    # The model outlives its engine.
    assert all(map(torch.equal, after, weights(engine))) if stage < 3 else True


def transport(comm):
    return comm.transport_of(torch.empty(1))


@on_ranks(2)
def test_engines_share_the_connection(rank, world):
    """Engines, one beside the other and one after the other, on one connection; ``zero.Init`` before them."""
    with deepspeed_c.zero.Init(config_dict_or_path=config("auto", 3)) as init:
        model = make_model()
    connection = transport(init.comm)
    assert connection.name == "shm"
    one = deepspeed_c.initialize(model=model, config=config("auto", 3))[0]
    two = start(config("shm", 1))
    off = start(config("off", 1))
    for i in range(2):
        step(one, rank, i)
        step(two, rank, i)
        step(off, rank, i)
    assert transport(one._comm) is transport(two._comm) is connection and transport(off._comm).name == "gloo"
    assert all(map(torch.equal, weights(two), weights(off)))
    one.close()
    two.close()
    step(off, rank, 3)
    off.close()
    with start(config("auto", 2)) as later:
        step(later, rank, 0)
        assert transport(later._comm) is connection
    with pytest.raises(ConfigError, match="'both'"):
        deepspeed_c.zero.Init(config_dict_or_path={"comm": {"local": "both"}})
    dist.barrier()


def killed_body(rank, world, stage):
    engine = start(config("auto", stage))
    step(engine, rank, 0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(CommError) as caught:
        for i in range(1, 50):
            step(engine, rank, i)
    seconds = time.monotonic() - begin
    text = str(caught.value)
    assert "rank 1 (process " in text and "shm)" in text, text
    assert "rank 1 has ended" in text.split("Fix")[1], f"the watchdog knows it too: {text}"
    assert seconds < 200, f"{seconds:.0f} s: nobody waits for the timeout of the group, which is 900 s"
    os._exit(0)  # the ranks that are left cannot close the group in order


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_others_say_which_rank_was_killed(run_ranks, stage):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, killed_body, stage, fresh=True, grace=200)
    outcomes = failed.value.outcomes
    assert "SIGKILL" in outcomes[1].text, str(failed.value)
    assert all("exit code 0" in outcomes[rank].text for rank in (0, 2)), str(failed.value)
