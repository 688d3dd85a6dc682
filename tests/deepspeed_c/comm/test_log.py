"""comm/log.py: bandwidths against the formulas of nccl-tests, trimmed means against a sort, and records against counts
by hand."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from deepspeed_c import comm
from deepspeed_c.comm.comm import comms_logger
from deepspeed_c.comm.log import CommsLogger, SharedCalls, bandwidths_gbps, convert_size, trim_mean
from deepspeed_c.compat.config_sections import DeepSpeedCommsConfig
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("op", "factors"),
    [
        ("all_reduce", (2, 1.5)),
        ("all_gather_into_tensor", (4, 3)),
        ("reduce_scatter_tensor", (4, 3)),
        ("all_to_all_single", (1, 0.75)),
        ("send", (1, 1)),
        ("barrier", (1, 1)),
    ],
)
def test_bandwidths(op, factors):
    # Four ranks; 1 GB in 2 s is 4 Gbit/s.
    assert bandwidths_gbps(op, 10**9, 2.0, 4) == pytest.approx([4 * f for f in factors])
    assert bandwidths_gbps(op, 10**9, 0.0, 4) == (0.0, 0.0)


def test_one_rank_has_no_bus():
    assert bandwidths_gbps("all_reduce", 10**9, 1.0, 1)[1] == 0.0


@pytest.mark.parametrize(
    ("values", "trim", "mean"),
    [
        ([], 0.1, 0.0),
        ([3.0], 0.5, 3.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([100.0, *range(1, 9), -100.0], 0.1, 4.5),
        ([1.0, 2.0, 4.0], 0.0, 7 / 3),
        ([9.0, 1.0, 2.0, 3.0, -7.0], 0.5, 2.0),
    ],
)
def test_trim_mean(values, trim, mean):
    given = list(values)
    assert trim_mean(given, trim) == pytest.approx(mean)
    assert given == list(values), "the caller's list was sorted"


def test_records_are_kept_by_name_and_size():
    log = CommsLogger()
    for seconds in (0.001, 0.003):
        log.record("all_reduce", "grads", seconds, 4096, 2)
    log.record("all_reduce", "grads", 0.5, 1, 2)
    log.record("broadcast", "weights", 0.002, 3 << 20, 2)
    summary = log.summary()
    assert list(summary) == ["grads", "weights"] and list(summary["grads"]) == [1, 4096]
    row = summary["grads"][4096]
    assert (row["count"], row["total_latency_ms"], row["avg_latency_ms"]) == (2, pytest.approx(4.0), pytest.approx(2.0))
    assert summary["grads"][1]["msg_size_str"] == "1.0 B" and summary["weights"][3 << 20]["msg_size_str"] == "3.0 MB"
    assert log.get_operation_summary("grads") == summary["grads"] and log.get_operation_summary("none") is None
    assert log.get_operation_names() == ["grads", "weights"] and log.get_total_operations() == 4
    text = log.format("title", summary)
    assert text.startswith("title\n") and "4.0 KB              2                   4.00" in text
    log.reset_data()
    assert not log.has_data() and log.summary() == {} == log.get_raw_data()


def test_each_call_counts_the_ranks_of_its_own_group():
    log = CommsLogger()
    for n_ranks in (2, 4, 0):  # 0: this rank is not in the group
        log.record("all_reduce", "mine", 0.001, 10**6, n_ranks)
    count, latencies, algorithm, bus = log.get_raw_data()["mine"][10**6]
    print(count, latencies, algorithm, bus)
    assert (count, latencies) == (3, pytest.approx([1.0] * 3))  # ms
    # 8 Mbit in 1 ms are 8 Gbit/s. The algorithm has twice as much, and the bus (n - 1) / n times that.
    assert algorithm == pytest.approx([16.0] * 3) and bus == pytest.approx([8.0, 12.0, 0.0])


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0B"), (1023, "1023.0 B"), (1024, "1.0 KB"), (1_600_000, "1.53 MB"), (10**12, "931.32 GB")],
)
def test_sizes_are_written_as_in_deepspeed(n_bytes, text):
    assert convert_size(n_bytes) == text


def test_deepspeeds_methods_choose_what_is_recorded():
    log = CommsLogger()
    log.configure(DeepSpeedCommsConfig({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["a"]}}))
    assert log.enabled and log.wants("a", False) and not log.wants("b", False) and log.wants("b", True)
    log.start_profiling_op(["b", "a"])
    assert log.prof_ops == ["a", "b"] and log.wants("b", False)
    log.stop_profiling_op(["a"])
    assert not log.wants("a", False) and log.wants("b", False)
    log.start_profiling_op("all_reduce")  # DeepSpeed takes each letter of the string for an operation
    assert log.prof_ops == ["b", "all_reduce"]
    log.start_profiling_comms()
    assert log.wants("a", False)
    log.stop_profiling_comms()
    assert not log.wants("a", False)
    log.append("all_reduce", "mine", 2.0, 1000)  # ms
    assert log.comms_dict == {"mine": {1000: [1, [2.0], [pytest.approx(0.008)], [0.0]]}}
    for off in ({}, {"comms_logger": {"enabled": False}}):
        log.configure(DeepSpeedCommsConfig(off))
        assert not log.enabled


def test_verbose_tells_each_call(caplog):
    log = CommsLogger()
    log.record("all_reduce", "quiet", 0.002, 4096, 2)
    log.verbose = True
    with caplog.at_level("INFO", logger="deepspeed_c"):
        log.record("all_reduce", "mine", 0.002, 4096, 2, "shm")
    print(caplog.messages)
    assert caplog.messages == ["comm mine over shm: 2.000 ms, 4.0 KB, algorithm 0.03 Gbit/s, bus 0.02 Gbit/s"]


BOTH, LATER = SharedCalls("0", "comm.all_reduce", (0, 1)), SharedCalls("0", "comm.reduce", (0, 1))


def test_calls_are_compared_by_their_numbers():
    log = CommsLogger()
    for number, seconds in ((3, 0.010), (5, 0.020), (6, 0.5)):
        log.record("all_reduce", "a", seconds, 8, 2, shared=(BOTH, number))
    log.record("send", "b", 0.001, 8, 2)
    log.record("reduce", "c", 0.001, 8, 2, shared=(LATER, 7))
    # The other rank waited for its calls in another order. It has no call number 6, and has two that this rank has not.
    table = log.stragglers(lambda mine: [mine, {BOTH: {5: 0.030, 3: 0.004, 9: 1.0, 10: 1.0}}])
    row = table["a"][8]
    assert row["count"] == 2
    assert row["total_comm_lat_ms"] == pytest.approx(24.0) and row["total_straggler_ms"] == pytest.approx(6.0)
    assert row["differs"] == "rank 0: 3 calls, rank 1: 4"
    assert table["b"][8]["count"] == 0 and "differs" not in table["b"][8], "a message has no partner to compare with"
    assert (table["c"][8]["count"], table["c"][8]["differs"]) == (0, "rank 0: 1 calls, rank 1: 0")
    assert "rank 0: 3 calls, rank 1: 4" in log.format("title", table)
    alike = log.stragglers(lambda mine: [mine, mine])
    assert "differs" not in alike["a"][8] and alike["a"][8]["total_straggler_ms"] == 0.0


def test_what_carried_a_call_is_in_its_row():
    log = CommsLogger()
    log.record("all_reduce", "grads", 0.001, 4096, 2, "shm")
    log.record("all_reduce", "grads", 0.001, 4096, 2, "gloo")
    log.record("all_reduce", "grads", 0.001, 4096, 2, "shm")
    log.record("all_reduce", "mine", 0.001, 4096, 2)
    summary = log.summary()
    assert summary["grads"][4096]["path"] == "shm, gloo" and "path" not in summary["mine"][4096]
    heading, _, row, *_ = log.format("title", summary).splitlines()[1:]
    assert heading.endswith("Path") and row.endswith("shm, gloo"), (heading, row)


LATE = 0.1  # seconds


def waits_body(rank, world):
    """The groups are (0, 1) and (2, 3). In each call one rank comes late."""
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    comm.configure(enabled=True)
    for late in (1, 1, 0):
        comm.barrier(group=mine)
        if rank == late:
            time.sleep(LATE)
        comm.all_reduce(torch.ones(7), group=mine)
    # Each group makes calls of its own. The table must not compare them with calls of the other group.
    comm.all_gather_into_tensor(torch.ones(12), torch.ones(3))
    result = comms_logger.log_all(print_log=False, show_straggler=True, return_dict=True)
    comm.configure(enabled=False)
    comm.reset_log()
    return result


def test_waiting_for_late_ranks_is_apart_from_moving():
    results = run_ranks(4, waits_body)
    waited = [each["straggler_analysis"]["all_reduce"][28]["total_straggler_ms"] for each in results]
    moved = [each["straggler_analysis"]["all_reduce"][28]["total_comm_lat_ms"] for each in results]
    print(waited, moved)
    # A rank waits when another rank is late, not when it is late itself.
    assert waited[0] > 1.8 * LATE * 1e3 and LATE * 1e3 * 0.9 < waited[1] < 1.5 * LATE * 1e3, waited
    assert max(waited[2:]) < 0.5 * LATE * 1e3 and max(moved) < 0.5 * LATE * 1e3, (waited, moved)
    for rank, each in enumerate(results):
        assert each["metadata"]["rank"] == rank and each["metadata"]["world_size"] == 4
        assert {name: {n: row["count"] for n, row in sizes.items()} for name, sizes in each["summary"].items()} == {
            "barrier": {0: 3},
            "all_reduce": {28: 3},
            "all_gather_into_tensor": {12: 1},
        }


def differs_body(rank, world):
    """Rank 1 begins to record one call later than the others. No rank may hang, or compare calls that do not match."""
    comm.configure(enabled=rank != 1)
    comm.all_reduce(torch.ones(5))
    comm.configure(enabled=True)
    for _ in range(2):
        comm.barrier()
        if rank == 2:
            time.sleep(LATE)
        comm.all_reduce(torch.ones(5))
    if rank == 0:
        comm.send(torch.ones(2), 2)
    elif rank == 2:
        comm.recv(torch.ones(2), 0)
    result = comms_logger.log_all(print_log=False, show_straggler=True, return_dict=True)
    comm.configure(enabled=False)
    comm.reset_log()
    return result["straggler_analysis"]


def test_ranks_that_recorded_different_calls_are_named():
    results = run_ranks(3, differs_body)
    for rank, table in enumerate(results):
        row = table["all_reduce"][20]
        print(rank, row)
        assert (row["count"], row["differs"]) == (2, "ranks 0, 2: 3 calls, rank 1: 2")
        assert (row["total_straggler_ms"] > 1.8 * LATE * 1e3) == (rank != 2), row
        assert "differs" not in table["barrier"][0]
        assert table.keys() - {"all_reduce", "barrier"} == {0: {"send"}, 2: {"recv"}}.get(rank, set())
