"""The communication log of an engine: its section in the configuration turns it on, and its counts and sizes equal
those computed from the model's size."""

import io
from contextlib import redirect_stdout

import pytest
import torch

import deepspeed_c
from deepspeed_c import comm
from deepspeed_c.comm.comm import comms_logger
from deepspeed_c.comm.ledger import Ledger, LedgerEntry
from deepspeed_c.inject.layers import LinearAllreduce, LinearLayer
from deepspeed_c.pipe import LayerSpec, PipelineModule
from tests import training
from tests.deepspeed_c.sequence import test_engine as sequences
from tests.ranks import on_ranks, run_ranks

WIDTH, LAYERS, STEPS, MICRO_BATCHES = 192, 3, 2, 2
N_BYTES = 4 * LAYERS * WIDTH * WIDTH  # all weights, or all gradients, in fp32


def _train(rank, stage, section, **keys):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    config = training.config(
        stage, zero=keys, accumulate=MICRO_BATCHES, **({} if section is None else {"comms_logger": section})
    )
    engine, *_ = deepspeed_c.initialize(model=model, config=config)
    comm.reset_log()  # forget the messages of the engine's start
    for _ in range(STEPS * MICRO_BATCHES):
        training.update(engine, engine(torch.full((1, WIDTH), rank + 1.0)).square().mean())
    return engine


def _log():
    """{operation: (number of large calls, their bytes in all)}, and the operations with smaller calls. A large call
    carries at least a quarter of a layer."""
    large, small = {}, set()
    for name, sizes in comm.log_summary(return_dict=True)["summary"].items():
        for n_bytes, row in sizes.items():
            assert row["total_latency_ms"] > 0 and row["msg_size_bytes"] == n_bytes, (name, row)
            if n_bytes < 4 * WIDTH * WIDTH // 4:
                small.add(name)
                continue
            count, total = large.get(name, (0, 0))
            large[name] = count + row["count"], total + row["count"] * n_bytes
    return large, small


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_counts_and_sizes_are_those_of_the_model(rank, world, stage):
    with redirect_stdout(io.StringIO()):
        engine = _train(rank, stage, {"enabled": True}, stage3_param_persistence_threshold=0)
        large, small = _log()
    gathered = {"all_gather_into_tensor": N_BYTES // world * STEPS}  # each rank's piece of the weights, after each step
    expected = {
        # Gradients are reduced at the boundary: once a step, however many micro-batches it has.
        0: {"all_reduce": N_BYTES * STEPS},
        1: {"reduce_scatter_tensor": N_BYTES * STEPS, **gathered},
        # Gradients are reduced in each micro-batch.
        2: {"reduce_scatter_tensor": N_BYTES * STEPS * MICRO_BATCHES, **gathered},
        # And all weights are gathered for each forward and each backward.
        3: {
            "reduce_scatter_tensor": N_BYTES * STEPS * MICRO_BATCHES,
            "all_gather_into_tensor": 2 * N_BYTES // world * STEPS * MICRO_BATCHES,
        },
    }[stage]
    found = {name: n_bytes for name, (_, n_bytes) in large.items()}
    if stage == 3:
        # The last weights of a forward are the first of its backward, and may be kept.
        at_most = expected.pop("all_gather_into_tensor")
        got = found.pop("all_gather_into_tensor")
        assert at_most // 2 <= got <= at_most, (got, at_most)
    assert found == expected, (found, expected)
    assert "all_reduce" in small, small  # norm, overflow and other agreements of ranks, once a step
    everything = comm.get_comm_operation_count()
    comm.configure(enabled=False)
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    assert comm.get_comm_operation_count() == everything
    assert Ledger.entry_type is LedgerEntry, "off, the log costs something"
    comm.reset_log()
    engine.close()


@on_ranks(2)
def test_each_bucket_is_a_call(rank, world):
    """Each bucket holds a layer, so there are as many calls as layers, each of a layer's size."""
    layer = 4 * WIDTH * WIDTH
    with redirect_stdout(io.StringIO()):
        engine = _train(rank, 2, {"enabled": True}, reduce_bucket_size=WIDTH * WIDTH)
        summary = comm.log_summary(return_dict=True)["summary"]
    counts = {name: {n: row["count"] for n, row in sizes.items()} for name, sizes in summary.items()}
    assert counts["reduce_scatter_tensor"] == {layer: LAYERS * STEPS * MICRO_BATCHES}, counts
    assert counts["all_gather_into_tensor"] == {layer // world: LAYERS * STEPS}, counts
    engine.close()
    comm.configure(enabled=False)
    comm.reset_log()


@on_ranks(2, fresh=True)
def test_the_section_and_the_summary(rank, world):
    engine = _train(rank, 1, None)
    assert comm.get_comm_operation_count() == 0 and Ledger.entry_type is LedgerEntry
    engine.close()

    # Only the operations listed by name are logged.
    engine = _train(rank, 1, {"enabled": True, "prof_all": False, "prof_ops": ["reduce_scatter_tensor"]})
    assert comm.get_logged_comm_ops() == ["reduce_scatter_tensor"]
    engine.close()

    # dist.configure has turned a log on. A configuration without the section leaves it on.
    engine = _train(rank, 1, None)
    assert comms_logger.enabled and comm.get_logged_comm_ops() == ["reduce_scatter_tensor"]
    engine.close()
    engine = _train(rank, 1, {"enabled": False})
    assert not comms_logger.enabled and not comm.has_comm_data()
    engine.close()

    engine = _train(rank, 2, {"enabled": True, "debug": True})
    names = comm.get_logged_comm_ops()
    assert any("reduce_scatter_tensor | [Caller Func: engine (backward" in name for name in names), names
    comm.reset_log()
    # The caller's own collectives are in the same log, once.
    comm.configure(debug=False)
    comm.all_reduce(torch.ones(8))
    assert comm.get_comm_operation_count() == 1 and comm.get_logged_comm_ops() == ["all_reduce"]
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    training.update(engine, engine(torch.ones(1, WIDTH)).square().mean())

    with redirect_stdout(io.StringIO()) as out:
        result = comm.log_summary(show_straggler=True, return_dict=True)
    text = out.getvalue()
    if rank > 0:
        assert text == "", text
    else:
        lines = text.splitlines()
        heads = ("Comm. Op", "Message Size", "Count", "Total Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)")
        assert all(head in lines[1] for head in heads), lines
        assert "Total straggler(ms)" in text and "reduce_scatter_tensor" in lines, text
    assert result["straggler_analysis"]["reduce_scatter_tensor"], result
    engine.close()
    comm.configure(enabled=False, prof_all=True, prof_ops=[])
    comm.reset_log()


def _counts(engine):
    """{operation: {bytes: calls}} of the summary, then of the straggler analysis."""
    result = comms_logger.log_all(print_log=False, show_straggler=True, return_dict=True)
    comm.configure(enabled=False)
    comm.reset_log()
    engine.destroy()
    return [
        {name: {n: row["count"] for n, row in sizes.items()} for name, sizes in result[key].items()}
        for key in ("summary", "straggler_analysis")
    ]


ROWS = 5


def pipeline_body(rank, world):
    layers = [LayerSpec(torch.nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(2)]
    module = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    config = training.config(rows=ROWS, accumulate=3, comms_logger={"enabled": True})
    engine, *_ = deepspeed_c.initialize(model=module, config=config)
    comm.reset_log()
    for _ in range(STEPS):
        engine.train_batch(iter([(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH))] * 3))
    return _counts(engine)


def test_messages_between_stages_are_in_the_log():
    everyone = run_ranks(2, pipeline_body)
    for rank, (summary, compared) in enumerate(everyone):
        print(rank, summary)
        # Each micro-batch sends its activations forward and their gradient back, each behind a header of 64 bytes.
        n_bytes = 4 * ROWS * WIDTH + 64
        assert (summary["send"][n_bytes], summary["recv"][n_bytes]) == (3 * STEPS, 3 * STEPS)
        assert summary == compared, "a message has two ends, which are compared"


def sequence_body(rank, world):
    config = {"train_micro_batch_size_per_gpu": sequences.BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = sequences.make_engine(2, {**config, "comms_logger": {"enabled": True}})
    comm.reset_log()
    sequences.train(engine, 1, range(STEPS))
    return _counts(engine)


def test_exchanges_of_sequence_ranks_are_in_the_log():
    ((summary, compared), _) = run_ranks(2, sequence_body)
    print(summary)
    # Two layers, forward and backward. One exchange carries queries, keys and values, another carries outputs.
    part = 4 * sequences.BATCH * sequences.TOKENS // 2 * sequences.WIDTH
    assert summary["all_to_all_single"] == {part: 4 * STEPS, 3 * part: 4 * STEPS} == compared["all_to_all_single"]


def tensors_body(rank, world):
    """Trains a layer cut over columns and a layer cut over rows; counts the bytes of their all-reduces."""
    torch.manual_seed(0)
    first, last = torch.nn.Linear(8, 12), torch.nn.Linear(12, 10)
    group = torch.distributed.group.WORLD
    pair = torch.nn.Sequential(LinearLayer(first, group), LinearAllreduce(last, group))
    comm.configure(enabled=True)
    x = torch.ones(ROWS, 8, requires_grad=True)
    for _ in range(STEPS):
        pair(x).sum().backward()
    result = comms_logger.log_all(print_log=False, return_dict=True)["summary"]["all_reduce"]
    comm.configure(enabled=False)
    comm.reset_log()
    return {n: row["count"] for n, row in result.items()}


def test_sums_of_tensor_parallel_ranks_are_in_the_log():
    for counts in run_ranks(2, tensors_body):
        print(counts)
        # Forward reduces outputs, backward reduces gradients of inputs.
        assert counts == {4 * ROWS * 10: STEPS, 4 * ROWS * 8: STEPS}
