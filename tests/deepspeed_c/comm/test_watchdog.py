"""comm/watchdog.py on real ranks: each kind of divergence ends the run with a text that names it. Nothing else ends the
run.

``hang`` imitates a backend that does not notice a lost rank, such as NCCL. gloo notices by its connections.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from deepspeed_c import comm as ds_comm
from deepspeed_c.comm import watchdog
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.comm.position import Presence
from deepspeed_c.comm.signed_store import SignedStore
from deepspeed_c.comm.verdict import EXIT_CODE
from deepspeed_c.comm.watchdog import _own_store, watch
from deepspeed_c.errors import CommError, ConfigError
from tests.ranks import RanksFailed, free_port, on_ranks
from tests.waits import ended, joined, set_within

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 1.0
# A test fails if a process has not ended, or a text has not come, after so many seconds. The limit is high because each
# step may take long on a busy machine.
LIMIT_S = 200.0


def make(folder, rank, group=None, timeout_s=TIMEOUT_S):
    """A watched group, after two collectives of all ranks. Its watchdog writes to a file of this rank."""
    write_to(folder, rank)
    comm = Collectives(group, reduce=lambda *_: None)
    watch(comm, timeout_s)
    comm.barrier()
    comm.ledger.phase = "forward"
    gather(comm, "layers.0.w")
    return comm


def write_to(folder, rank):
    """From here on write stderr of this rank to a file of its own, line by line."""
    sys.stderr = open(os.path.join(folder, str(rank)), "w", buffering=1)  # noqa: SIM115  the rank ends with it


def has_said(folder, rank, pattern, n_times=1):
    return len(re.findall(pattern, (Path(folder) / str(rank)).read_text())) >= n_times


def gather(comm, label):
    comm.all_gather(torch.zeros(4 * comm.world_size), label=label).wait()


def scatter(comm, label):
    comm.reduce_scatter(torch.zeros(4 * comm.world_size), torch.zeros(4), label=label).wait()


def hang(comm, label, op="all-gather", n_bytes=16):
    with comm.ledger.enter(op, n_bytes, label):
        time.sleep(10 * LIMIT_S)


def diverge(run_ranks, tmp_path, world, body, *args, others=()):
    """Run ``body``. All ranks except ``others`` must exit with EXIT_CODE and the same report, which is returned."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(world, body, str(tmp_path), *args, fresh=True, timeout=LIMIT_S, grace=LIMIT_S)
    told = []
    for outcome in failed.value.outcomes:
        if outcome.rank in others:
            continue
        assert outcome.kind == "died" and f"exit code {EXIT_CODE}" in outcome.text, str(failed.value)
        text = (tmp_path / str(outcome.rank)).read_text()
        assert text.count("ranks have diverged") == 1, text
        assert f"[CRITICAL] [rank {outcome.rank}]" in text and f"exit code {EXIT_CODE}" in text, text
        told.append(text[text.index("ranks have diverged") :])
    assert len(set(told)) == 1, told
    return told[0]


# ---- ranks that go different ways


def other_collective_body(rank, world, folder):
    comm = make(folder, rank)
    if rank == 1:
        comm.ledger.phase = "backward"
        scatter(comm, "layers.8.mlp.w2 (+3 more)")
    gather(comm, "layers.7.mlp.w1")


@pytest.mark.parametrize("world", [2, 3])
def test_another_collective(run_ranks, tmp_path, world):
    text = diverge(run_ranks, tmp_path, world, other_collective_body)
    assert "collective #3 is not the same on all ranks" in text
    who = "rank 0" if world == 2 else "ranks 0, 2"
    n_bytes = 16 * world
    assert f"{who} entered all-gather #3 of layers.7.mlp.w1 (forward), {n_bytes} bytes" in text, text
    assert f"rank 1 entered reduce-scatter #3 of layers.8.mlp.w2 (+3 more) (backward), {n_bytes} bytes" in text, text
    waits = "waits" if world == 2 else "wait"
    assert re.search(rf"{who} {waits} in all-gather #3 of layers.7.mlp.w1 \(forward\) for \d+ s", text), text
    assert "Fix: " in text


def other_data_body(rank, world, folder, label, n_bytes):
    comm = make(folder, rank)
    hang(comm, *((label, "all-gather", n_bytes) if rank == 1 else ("w", "all-gather", 16)))


@pytest.mark.parametrize(("label", "n_bytes"), [("w", 24), ("v", 16)])
def test_the_same_collective_with_other_data(run_ranks, tmp_path, label, n_bytes):
    text = diverge(run_ranks, tmp_path, 2, other_data_body, label, n_bytes)
    assert "rank 0 entered all-gather #3 of w (forward), 16 bytes" in text, text
    assert f"rank 1 entered all-gather #3 of {label} (forward), {n_bytes} bytes" in text, text


def extra_body(rank, world, folder):
    comm = make(folder, rank)
    for i in range(5):
        if rank == 0 and i == 2:
            # This gather has the size of its neighbours. So the ranks go on for a while, with data of the wrong
            # collective.
            gather(comm, "expert.3")
        gather(comm, f"layers.{i}.w")
    time.sleep(10 * LIMIT_S)


def test_one_collective_more(run_ranks, tmp_path):
    text = diverge(run_ranks, tmp_path, 2, extra_body)
    assert "rank 0 entered all-gather #5 of expert.3 (forward)" in text, text
    assert "rank 1 entered all-gather #5 of layers.2.w (forward)" in text, text


def barrier_body(rank, world, folder, is_ours):
    comm = make(folder, rank)
    if rank == 1:
        (ds_comm.barrier if is_ours else dist.barrier)()
    gather(comm, "layers.1.w")


def test_a_call_of_torch_on_one_rank(run_ranks, tmp_path):
    text = diverge(run_ranks, tmp_path, 2, barrier_body, False)
    assert re.search(
        r"rank 1 is in torch.distributed.barrier, called at \S*test_watchdog.py:\d+ in barrier_body", text
    ), text
    assert "rank 0 waits in all-gather #3 of layers.1.w (forward)" in text, text


def test_a_call_of_the_user_on_one_rank(run_ranks, tmp_path):
    text = diverge(run_ranks, tmp_path, 2, barrier_body, True)
    assert re.search(r"rank 1 entered comm.barrier #3 \(forward, \S*test_watchdog.py:\d+\), 0 bytes", text), text


# ---- groups


def test_a_group_of_some_ranks_is_named_and_all_ranks_end(run_ranks, tmp_path):
    text = diverge(run_ranks, tmp_path, 3, kept_world_body)
    assert "collective #3 of the group of ranks 0, 2 is not the same on all ranks" in text, text
    assert "rank 0 waits in all-gather #3 of experts.0.w (forward) of the group of ranks 0, 2 for" in text, text
    assert re.search(r"rank 1 is at \S*test_watchdog.py:\d+ in kept_world_body", text), text


def kept_world_body(rank, world, folder):
    group = dist.new_group([0, 2])
    if rank != 1:
        comm = make(folder, rank, group)
        (scatter if rank == 2 else gather)(comm, f"experts.{rank}.w")
    else:
        write_to(folder, rank)
        comm = Collectives(reduce=lambda *_: None)
        watch(comm, TIMEOUT_S)
        time.sleep(10 * LIMIT_S)


def mesh_body(rank, world, folder):
    comm = make(folder, rank)
    shard = Mesh(comm, {"dp_replicate": 2, "dp_shard": 2}).along("dp_shard")
    if rank < 2:
        hang(shard, f"layers.{rank}.w")
    gather(shard, "layers.0.w")
    hang(comm, "layers.1.w")


def test_a_group_of_a_mesh_is_named_by_its_axes(run_ranks, tmp_path):
    text = diverge(run_ranks, tmp_path, 4, mesh_body)
    assert "collective #1 over dp_shard (ranks 0-1) is not the same on all ranks" in text, text
    assert "rank 1 waits in all-gather #1 of layers.1.w over dp_shard (ranks 0-1) for" in text, text
    assert "ranks 2-3 wait in all-gather #3 of layers.1.w (forward) for" in text, text


def crossed_groups_body(rank, world, folder):
    group = dist.new_group([0, 1])
    comm = make(folder, rank)
    if rank < 2:
        sub = Collectives(group, reduce=lambda *_: None)
    if rank == 0:
        # Lets the other ranks end first: their lost connections must not raise in the group that is not watched.
        # This changes only the rank of this test.
        watchdog._LINGER_S = 4.0
        gather(sub, "experts.0.w")
    gather(comm, "layers.1.w")


def test_groups_that_wait_for_each_other(run_ranks, tmp_path):
    text = diverge(run_ranks, tmp_path, 3, crossed_groups_body)
    assert "ranks 0-1 wait for each other" in text, text
    assert "rank 0 waits in all-gather #1 of experts.0.w of the group of ranks 0-1 for" in text, text
    assert "ranks 1-2 wait in all-gather #3 of layers.1.w (forward) for" in text, text


# ---- ranks that are lost


def killed_body(rank, world, folder, signum):
    comm = make(folder, rank)
    if rank == 1:
        os.kill(os.getpid(), signum)
    hang(comm, "layers.1.w")


@pytest.mark.parametrize(
    ("signum", "text"), [(signal.SIGKILL, "has ended without a word"), (signal.SIGSTOP, "is stopped by a signal")]
)
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_is_killed_or_stopped(run_ranks, tmp_path, world, signum, text):
    told = diverge(run_ranks, tmp_path, world, killed_body, signum, others=[1])
    assert "rank 1 will not come" in told and f"rank 1 {text} (process " in told, told
    assert "in all-gather #3 of layers.1.w (forward) for" in told, told


def noticed_body(rank, world, folder):
    # The backend's error must come first, however long a busy machine takes to end a process.
    comm = make(folder, rank, timeout_s=20.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError) as caught:
        for _ in range(1000):
            gather(comm, "layers.1.w")
            time.sleep(0.01)
    comm.close()
    return str(caught.value)


def test_an_error_of_the_backend_names_the_rank_and_the_parameter(run_ranks, tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, noticed_body, str(tmp_path), fresh=True, grace=LIMIT_S)
    kinds = [outcome.kind for outcome in failed.value.outcomes]
    assert kinds == ["returned", "died"], str(failed.value)
    text = failed.value.outcomes[0].value
    assert re.search(
        r"rank 0, all-gather #\d+ of layers.1.w \(forward\): all_gather of 8 torch.float32 failed", text
    ), text
    assert re.search(r"Fix: rank 1 has ended without a word \(process \d+ on ", text), text


def stale_alarm_body(rank, world, folder):
    store = _own_store()
    comm = make(folder, rank)
    if rank == 0:
        # Raise an alarm. The rank that should judge it never reports.
        store.set("alarm/1", "7")
    dist.barrier()
    hang(comm, f"layers.{rank}.w")


def test_a_judge_that_is_lost_is_replaced(run_ranks, tmp_path):
    assert "rank 1 entered all-gather #3 of layers.1.w" in diverge(run_ranks, tmp_path, 2, stale_alarm_body)


# ---- a stranger who reaches the store


def attacked_body(rank, world, folder, attack, port):
    """The run must go on while rank 0 lets a stranger write to the store. The stranger has no token to sign with."""
    os.environ["DSC_RUN_TOKEN"] = "s3cret"
    watchdog._CONFIRM_S = watchdog._LINGER_S = 0.1  # changes only the rank of this test
    if attack == "answer":
        # A rank of another host is lost if it does not answer in time. Its thread may be late on a busy machine.
        watchdog._Watchdog._grace_s = property(lambda self: 6.0)
    if attack == "answer" and rank == 1:
        # This rank seems to be on another host, so rank 0 cannot see that its process runs.
        watchdog.own_presence = lambda: Presence("elsewhere", 1, 1)
    dist.destroy_process_group()
    ds_comm.init_distributed(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    comm = make(folder, rank)
    store = _own_store()
    if rank == 1 and attack == "answer":
        # From now on the other rank cannot verify this rank's answers.
        watchdog._dogs["it"]._signed = SignedStore(store, "")
    if rank == 0 and attack == "report":
        report = msgspec.json.encode(
            watchdog._Report("diverged", "ranks have diverged: says a stranger", 0, 2)
        ).decode()
        store.set("report/1", report)
        SignedStore(store, "").write("report/2", report)
        for k in (1, 2, 3):
            store.set(f"alarm/{k}", "0")
    if rank == 0 and attack == "counter":
        store.set("n_at/1/1", "no number")
    if attack == "report":
        # Both ranks have handled the first two alarms when they answer the third.
        while store.add("n_at/3/1", 0) < world:
            time.sleep(0.02)
    elif rank == 0:
        hang_until(comm, lambda: has_said(folder, 0, "somebody who is not of this run"))
        store.set("seen", "")
    else:
        while not store.check(["seen"]):
            time.sleep(0.02)
    dist.barrier()
    comm.close()


def hang_until(comm, condition):
    with comm.ledger.enter("all-gather", 16, "layers.1.w"):
        while not condition():
            time.sleep(0.02)


@pytest.mark.parametrize("attack", ["report", "answer", "counter"])
def test_a_stranger_who_reaches_the_store_cannot_end_the_run(run_ranks, tmp_path, attack):
    run_ranks(2, attacked_body, str(tmp_path), attack, free_port(), fresh=True)
    said = "".join((tmp_path / str(rank)).read_text() for rank in (0, 1))
    assert "diverged" not in said and "CRITICAL" not in said, said
    assert said.count("somebody who is not of this run") >= (attack != "report"), said
    assert "s3cret" not in said, said


# ---- ranks that are merely late


def late_body(rank, world, folder, late):
    comm = make(folder, rank)
    while rank == late and not has_said(folder, 0, rf"rank {late} is at \S*test_watchdog.py:\d+ in late_body, ", 2):
        time.sleep(0.2)
    gather(comm, "layers.1.w")
    comm.close()


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_reported_again_and_again_and_the_run_goes_on(run_ranks, tmp_path, late):
    run_ranks(2, late_body, str(tmp_path), late, fresh=True)
    said = (tmp_path / "0").read_text()
    assert said.count(f"rank {late} lets others wait") >= 2, said
    assert re.search(rf"rank {1 - late} waits in all-gather #3 of layers.1.w \(forward\) for \d+ s", said), said
    assert re.search(
        rf"rank {late} is at \S*test_watchdog.py:\d+ in late_body, after all-gather #2 of layers.0.w", said
    ), said
    assert "[WARNING] [rank 0]" in said and "diverged" not in said, said
    assert (tmp_path / "1").read_text() == "", "one rank says it for all"


SILENT = "rank 1 gives no answer: something holds Python's interpreter lock (process "


def busy_body(rank, world, folder):
    comm = make(folder, rank)
    if rank == 1:
        fifo = os.open(os.path.join(folder, "fifo"), os.O_RDONLY)
        # This call of C holds the interpreter until the test writes to the fifo.
        assert ctypes.PyDLL(None).read(fifo, ctypes.create_string_buffer(1), 1) == 1
        os.close(fifo)
    gather(comm, "layers.1.w")
    comm.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc: a rank that is silent counts as lost")
def test_a_rank_that_holds_the_interpreter_is_late_and_not_lost(run_ranks, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    is_over = threading.Event()

    def let_go_once_it_is_reported():
        fifo = os.open(tmp_path / "fifo", os.O_RDWR)  # O_RDWR does not wait for a reader
        while not is_over.wait(0.1):
            if (tmp_path / "0").exists() and has_said(tmp_path, 0, re.escape(SILENT)):
                os.write(fifo, b"x")
                set_within(is_over)
        os.close(fifo)

    thread = threading.Thread(target=let_go_once_it_is_reported)
    thread.start()
    try:
        run_ranks(2, busy_body, str(tmp_path), fresh=True)
    finally:
        is_over.set()
        joined(thread)
    said = (tmp_path / "0").read_text()
    assert SILENT in said and "diverged" not in said, said


def absent_body(rank, world, folder):
    write_to(folder, rank)
    dist.barrier()  # both ranks have made their files
    while rank == 1 and not has_said(folder, 0, "rank 1 has not come to deepspeed_c.initialize"):
        time.sleep(0.05)
    comm = Collectives(reduce=lambda *_: None)
    watch(comm, TIMEOUT_S)
    gather(comm, "model")
    comm.close()


def test_a_rank_that_has_not_started_is_waited_for(run_ranks, tmp_path):
    run_ranks(2, absent_body, str(tmp_path), fresh=True)
    said = (tmp_path / "0").read_text()
    assert "rank 1 has not come to deepspeed_c.initialize() yet" in said and "diverged" not in said, said


QUIET_S = 4.0  # tolerated lateness between ranks on a busy machine


def quiet_body(rank, world, folder):
    comm = make(folder, rank, timeout_s=QUIET_S)
    second = Collectives(reduce=lambda *_: None)
    watch(second, QUIET_S)
    time.sleep(1.2 * QUIET_S)  # no rank waits for another meanwhile
    dist.barrier()  # ranks leave the pause together; torch's own barrier is not watched
    for i in range(3):
        work = comm.all_gather(torch.zeros(4 * world), label=f"layers.{i}.w")
        time.sleep(0.2 * rank)
        work.wait()
        scatter(second, f"layers.{i}.w")
        ds_comm.all_reduce(torch.zeros(3))
    comm.close()
    second.close()


@pytest.mark.parametrize("world", [2, 3])
def test_a_normal_run_with_long_computations_says_nothing(run_ranks, tmp_path, world):
    run_ranks(world, quiet_body, str(tmp_path), fresh=True)
    assert [(tmp_path / str(r)).read_text() for r in range(world)] == [""] * world


# ---- the thread


def dogs():
    return [thread for thread in threading.enumerate() if thread.name == "deepspeed_c watchdog"]


@on_ranks(2)
def test_one_thread_that_ends_with_the_last_who_is_watched(rank, world):
    one, two = Collectives(reduce=lambda *_: None), Collectives(reduce=lambda *_: None)
    watch(one, 0.0)
    assert dogs() == [], "0 is off"
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="collective_timeout_s"):
            watch(one, wrong)
    watch(one, 5.0)
    watch(two, 3.0)
    (thread,) = dogs()
    assert thread.daemon
    one.close()
    one.close()
    assert dogs() == [thread] and thread.is_alive(), "the second one is still watched"
    two.close()
    assert dogs() == [] and not thread.is_alive()
    third = Collectives(reduce=lambda *_: None)
    watched = watch(third, 5.0)
    assert len(dogs()) == 1
    watched.close()
    assert dogs() == []
    # The group is dropped without close().
    watch(third, 5.0)
    assert len(dogs()) == 1
    del third, watched
    gc.collect()
    assert dogs() == []
    dist.barrier()


def n_files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc: open files are not counted")
@on_ranks(2)
def test_watching_again_and_again_leaks_nothing(rank, world):
    comm = Collectives(reduce=lambda *_: None)

    def cycle():
        for _ in range(10):
            watch(comm, 5.0)
            comm.barrier()
            comm.close()

    cycle()
    before = n_files(), threading.active_count()
    cycle()
    cycle()
    assert (n_files(), threading.active_count()) == before
    assert comm.ledger.explain() == ""
    dist.barrier()


@on_ranks(1)
def test_one_rank_needs_no_watchdog(rank, world):
    comm = Collectives(reduce=lambda *_: None)
    watch(comm, 1.0)
    assert dogs() == []
    comm.close()


def new_world_body(rank, world, folder):
    comm = make(folder, rank)
    (old,) = dogs()
    dist.destroy_process_group()
    store = dist.FileStore(os.path.join(folder, "again"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    again = Collectives(reduce=lambda *_: None)
    watch(again, TIMEOUT_S)
    assert dogs() != [old] and len(dogs()) == 1, "the group that the first one watched is gone"
    assert again.ledger is not comm.ledger and again.ledger.last == 0
    again.barrier()
    comm.close()
    assert len(dogs()) == 1, "closing what was watched before leaves the new one alone"
    hang(again, f"layers.{rank}.w")


def test_a_world_that_is_made_anew(run_ranks, tmp_path):
    assert "rank 1 entered all-gather #2 of layers.1.w, 16 bytes" in diverge(run_ranks, tmp_path, 2, new_world_body)


# ---- whole processes: how they end, and what the launcher makes of it

SCRIPT = """
import os, sys, time, torch
sys.path.insert(0, {root!r})
import deepspeed_c
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.watchdog import watch
from tests.deepspeed_c.comm.test_watchdog import gather, hang, scatter
deepspeed_c.init_distributed(verbose=False)
comm = Collectives(reduce=lambda *_: None)
watch(comm, {timeout_s})
comm.barrier()
rank = comm.rank
{body}
"""


def write_script(tmp_path, body, timeout_s=TIMEOUT_S):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(root=str(ROOT), body=body, timeout_s=timeout_s))
    return str(path)


def run_pair(tmp_path, body, timeout_s=TIMEOUT_S):
    """Run two processes without a launcher, because a launcher would end one after the failure of the other. Return
    (exit code, standard error) of each."""
    script = write_script(tmp_path, body, timeout_s)
    port = free_port()
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    env["GLOO_SOCKET_IFNAME"] = "lo"
    processes = [
        subprocess.Popen(
            [sys.executable, script],
            env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    try:
        return [(ended(p), err) for p, err in [(p, p.communicate(timeout=LIMIT_S)[1]) for p in processes]]
    finally:
        for p in processes:
            p.kill()
            ended(p)


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [("sys.exit(0)", 0, ""), ("raise ValueError('boom\\nand more')", 1, " with ValueError: boom")],
    ids=["ends early", "raises"],
)
def test_a_rank_that_ends(tmp_path, end, code, how):
    body = f"if rank == 1:\n    {end}\nhang(comm, 'layers.1.w')"
    (code_0, text_0), (code_1, text_1) = run_pair(tmp_path, body)
    assert (code_0, code_1) == (EXIT_CODE, code), (text_0, text_1)
    assert f"rank 1 has ended{how}, after barrier #1 (process " in text_0, text_0
    assert "rank 0 waits in all-gather #2 of layers.1.w for" in text_0, text_0
    assert "diverged" not in text_1, text_1


def test_the_error_of_a_rank_is_told_by_the_others(tmp_path):
    body = "if rank == 1:\n    raise ValueError('boom')\nfor _ in range(1000):\n    gather(comm, 'layers.1.w'); time.sleep(0.01)"
    # The error must come first, however long a busy machine takes to end a process.
    (code_0, text_0), (code_1, _) = run_pair(tmp_path, body, timeout_s=20.0)
    assert (code_0, code_1) == (1, 1), text_0
    assert "of layers.1.w" in text_0 and "rank 1 has ended with ValueError: boom, after" in text_0, text_0


def test_the_store_goes_with_rank_0(tmp_path):
    body = "if rank == 0:\n    os._exit(3)\nhang(comm, 'layers.1.w')"
    (code_0, _), (code_1, text_1) = run_pair(tmp_path, body)
    assert (code_0, code_1) == (3, EXIT_CODE), text_1
    assert "rank 1 waits in all-gather #2 of layers.1.w, and the store of the ranks cannot be reached" in text_1, text_1


def test_a_run_that_ends_well_says_nothing(tmp_path):
    # Rank 0 hosts the store, and rank 1 runs a while longer. So rank 0 lingers, here long enough for a busy machine.
    body = "from deepspeed_c.comm import watchdog; watchdog._LINGER_S = 60.0\ngather(comm, 'w')\ntime.sleep(rank)"
    assert run_pair(tmp_path, body, timeout_s=20.0) == [(0, ""), (0, "")]


def test_the_launcher_ends_with_the_ranks_exit_code(tmp_path):
    script = write_script(tmp_path, "(scatter if rank else gather)(comm, f'layers.{rank}.w')")
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed_c", "--num_procs", "2", script],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == EXIT_CODE, (done.returncode, done.stderr)
    assert "rank 1 entered reduce-scatter #2 of layers.1.w, 32 bytes" in done.stderr, done.stderr
