"""comm/log.py: bandwidths against nccl-tests' formulas, trimmed means against a sort, records against hand counts."""

from __future__ import annotations

import pytest

from deepspeed_c.comm.log import CommsLogger, bandwidths_gbps, trim_mean


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
    # 1 GB in 2 s is 4 Gbit/s; four ranks.
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
        log.append("all_reduce", "grads", seconds, 4096, 2)
    log.append("all_reduce", "grads", 0.5, 1, 2)
    log.append("broadcast", "weights", 0.002, 3 << 20, 2)
    summary = log.summary(2)
    assert list(summary) == ["grads", "weights"] and list(summary["grads"]) == [1, 4096]
    row = summary["grads"][4096]
    assert (row["count"], row["total_latency_ms"], row["avg_latency_ms"]) == (2, pytest.approx(4.0), pytest.approx(2.0))
    assert summary["grads"][1]["msg_size_str"] == "1 B" and summary["weights"][3 << 20]["msg_size_str"] == "3.00 MB"
    text = log.format("title", summary)
    assert text.startswith("title\n") and "4.00 KB             2                   4.00" in text
    log.reset_data()
    assert not log.has_data() and log.summary(2) == {}


def test_stragglers_of_ranks_with_different_records():
    log = CommsLogger()
    for seconds in (0.010, 0.020):
        log.append("all_reduce", "a", seconds, 8, 2)
    log.append("send", "b", 0.001, 8, 2)
    table = log.stragglers(lambda mine: [mine, {("a", 8): [0.004, 0.030, 0.001]}])
    row = table["a"][8]
    assert row["count"] == 2
    assert row["total_comm_lat_ms"] == pytest.approx(24.0) and row["total_straggler_ms"] == pytest.approx(6.0)
    assert table["b"][8]["count"] == 0 and table["b"][8]["avg_straggler_ms"] == 0.0


def test_what_carried_a_call_is_in_its_row():
    log = CommsLogger()
    log.append("all_reduce", "grads", 0.001, 4096, 2, "shm")
    log.append("all_reduce", "grads", 0.001, 4096, 2, "gloo")
    log.append("all_reduce", "grads", 0.001, 4096, 2, "shm")
    log.append("all_reduce", "mine", 0.001, 4096, 2)
    summary = log.summary(2)
    assert summary["grads"][4096]["path"] == "shm, gloo" and "path" not in summary["mine"][4096]
    heading, _, row, *_ = log.format("title", summary).splitlines()[1:]
    assert heading.endswith("Path") and row.endswith("shm, gloo"), (heading, row)
