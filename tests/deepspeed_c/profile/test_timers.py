"""profile/timers.py under a clock that the test moves, and reports of memory compared with memory that the test
allocates."""

from __future__ import annotations

import types

import pytest
import torch

from deepspeed_c.errors import StateError
from deepspeed_c.profile import timers
from deepspeed_c.profile.timers import (
    NoopTimer,
    SynchronizedWallClockTimer,
    ThroughputTimer,
    measure_memory,
    resident_bytes,
    see_memory_usage,
)

CPU = torch.device("cpu")


class Clock:
    """A clock that stands still unless it is moved. Counts how often it is read."""

    def __init__(self):
        self.now, self.n_reads = 100.0, 0

    def __call__(self):
        self.n_reads += 1
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lines(monkeypatch):
    said = []
    monkeypatch.setattr(timers, "log_dist", lambda message, ranks=None: said.append((message, ranks)))
    return said


def spend(clock, timer, *seconds):
    for s in seconds:
        timer.start()
        clock.now += s
        timer.stop()


def test_a_timer_adds_up_in_ms(clock):
    group = SynchronizedWallClockTimer(clock=clock)
    timer = group("forward")
    assert group("forward") is timer and group.get_timers() == {"forward": timer}
    spend(clock, timer, 0.25, 0.5)
    assert timer.elapsed(reset=False) == pytest.approx(750)
    assert timer.elapsed() == pytest.approx(750) and timer.elapsed() == 0.0


def test_a_running_timer_is_read_and_goes_on(clock):
    timer = SynchronizedWallClockTimer(clock=clock)("step")
    timer.start()
    clock.now += 1
    assert timer.elapsed(reset=False) == pytest.approx(1000)
    clock.now += 2
    timer.stop()
    assert timer.elapsed() == pytest.approx(3000)
    timer.start()
    clock.now += 5
    timer.reset()
    assert timer.elapsed() == 0.0 and not timer.started_


def test_stop_may_replace(clock):
    timer = SynchronizedWallClockTimer(clock=clock)("step")
    spend(clock, timer, 3.0)
    timer.start()
    clock.now += 1
    timer.stop(reset=True)
    assert timer.elapsed() == pytest.approx(1000)


def test_misuse_is_named(clock):
    timer = SynchronizedWallClockTimer(clock=clock)("step")
    with pytest.raises(StateError, match="timer step: is not running"):
        timer.stop()
    timer.start()
    with pytest.raises(StateError, match="timer step: was started already"):
        timer.start()
    with pytest.raises(ValueError, match="normalizer is 0"):
        SynchronizedWallClockTimer(clock=clock).log(["x"], normalizer=0)


def test_means_are_trimmed(clock):
    group = SynchronizedWallClockTimer(clock=clock)
    assert group("none").mean() == 0.0
    spend(clock, group("step"), 100.0, *[1.0] * 8, 0.0)
    assert group("step").mean() == pytest.approx(1000)
    assert group.get_mean(["step", "absent"], normalizer=4.0) == {"step": pytest.approx(250)}
    assert group.get_mean(["step"]) == {"step": 0.0}, "not reset"


def test_log(clock, lines):
    group = SynchronizedWallClockTimer(clock=clock)
    spend(clock, group("forward"), 0.001)
    spend(clock, group("step"), 0.5)
    group.log(["forward", "absent", "step"], normalizer=2.0, ranks=[0, 3])
    assert lines == [("time (ms) | forward: 0.50 | step: 250.00", [0, 3])]
    group.log(["step"], memory_breakdown=True)
    assert lines[1][0].startswith("time (ms) | step: 0.00 | ") and lines[1][1] == [0]


def test_the_hosts_clock_measures_on_the_cpu():
    import time

    timer = SynchronizedWallClockTimer(device=CPU)("sleep")
    begin = time.perf_counter()
    timer.start()
    time.sleep(0.02)
    timer.stop()
    outer_ms = (time.perf_counter() - begin) * 1e3
    assert 20 <= timer.elapsed() <= outer_ms


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_events_measure_on_the_device():
    group = SynchronizedWallClockTimer()
    x = torch.ones(4096, 4096, device="cuda")
    for _ in range(2):
        group("mm").start()
        for _ in range(20):
            x = x @ x * 0
        group("mm").stop()
    assert len(group("mm").spans_ms()) == 2 and group("mm").elapsed() > 0.1


def test_noop():
    group = NoopTimer()
    group("x").start()
    group("x").stop(record=True)
    group("x").reset()
    group.log(["x"])
    assert (
        group("x").elapsed(reset=True) == group("x").mean() == 0 and group.get_mean(["x"]) == group.get_timers() == {}
    )


def config(enabled=True, synchronized=True):
    return types.SimpleNamespace(enabled=enabled, synchronized=synchronized)


def test_throughput_leaves_out_the_first_steps(clock):
    timer = ThroughputTimer(config(), 32, start_step=2, tokens_per_sample=10, clock=clock)
    assert timer.avg_samples_per_sec() == float("-inf")
    for seconds in (100.0, 50.0, 2.0, 2.0, 4.0):
        for i in range(2):  # two micro-batches a step
            timer.start()
            clock.now += seconds / 2
            timer.stop(global_step=i == 1)
            clock.now += 7  # between batches, not counted
    assert timer.global_step_count == 5 and timer.micro_step_count == 10
    assert timer.total_elapsed_time == pytest.approx(8.0)
    assert timer.avg_samples_per_sec() == pytest.approx(32 * 3 / 8)
    assert timer.avg_tokens_per_sec() == pytest.approx(32 * 3 / 8 * 10)
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)


def test_throughput_reports_when_due(clock):
    said = []
    timer = ThroughputTimer(
        config(), 8, start_step=1, steps_per_output=2, monitor_memory=True, logging_fn=said.append, clock=clock
    )
    for seconds in (9.0, 1.0, 2.0, 4.0):
        timer.start()
        clock.now += seconds
        timer.stop(global_step=True)
    assert len(said) == 2, said
    assert "global_step=2" in said[0] and "RunningAvgSamplesPerSec=8," in said[0]
    assert "global_step=4" in said[1] and "RunningAvgSamplesPerSec=3.429" in said[1]
    assert "CurrSamplesPerSec=2" in said[1] and "host RSS" in said[1]


def test_disabled_throughput_reads_no_clock(clock):
    timer = ThroughputTimer(config(enabled=False), 8, clock=clock)
    for _ in range(5):
        timer.start()
        timer.stop(global_step=True)
    assert clock.n_reads == 0 and timer.global_step_count == 0 and timer.avg_tokens_per_sec() == float("-inf")


@pytest.mark.skipif(not timers._proc("/proc/self/status"), reason="no /proc")
def test_memory_sees_what_is_taken():
    before, resident = measure_memory(), resident_bytes()
    block = torch.ones(64 << 18)  # 64 MiB
    after = measure_memory()
    for name in ("host_rss_bytes", "host_pss_bytes"):
        grown = getattr(after, name) - getattr(before, name)
        assert 48 << 20 < grown < 160 << 20, (name, grown)
    assert 48 << 20 < resident_bytes() - resident < 160 << 20, (resident, resident_bytes())
    assert after.host_peak_bytes >= after.host_rss_bytes - (1 << 20) and after.host_peak_bytes > block.nbytes
    assert 0 < after.host_available_bytes <= after.host_total_bytes
    assert after.host_pss_bytes <= after.host_rss_bytes + (1 << 20)
    if not torch.accelerator.is_available():
        assert after.device_allocated_bytes is None


def test_see_memory_usage(lines):
    assert see_memory_usage("quiet") is None and lines == []
    report = see_memory_usage("after the step", force=True)
    ((message, ranks),) = lines
    assert message.startswith("after the step: ") and "host RSS" in message and ranks == [0]
    assert f"{report.host_rss_bytes / 1024**3:.2f} GB" in message


def test_where_there_is_no_proc(monkeypatch):
    monkeypatch.setattr(timers, "_proc", lambda path: {})
    report = measure_memory()
    assert report.host_rss_bytes is None and report.host_peak_bytes > 1 << 20
    assert "host RSS ?" in timers._host_text(report)
