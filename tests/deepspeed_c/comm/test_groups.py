"""comm/groups.py: ranks find each other, and what goes wrong is said within the time limit. Each case runs in processes
of its own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PREAMBLE = """
import os, sys, time
from datetime import timedelta
from deepspeed_c import comm
from deepspeed_c.errors import CommError
import torch, torch.distributed as dist
"""
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_",
    "OMPI_",
    "PMI_",
    "MPI_",
    "SLURM_",
    "MV2_",
    "TORCHELASTIC",
)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(body, **environ):
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    env.update({k: str(v) for k, v in environ.items()}, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(body)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes, timeout=60):
    """[(exit code, stdout, stderr)]; whatever still runs after ``timeout`` seconds fails the test."""
    deadline, results = time.monotonic() + timeout, []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            results.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


def ok(*processes, timeout=60):
    results = finish(*processes, timeout=timeout)
    for code, out, err in results:
        assert code == 0, f"exit {code}\n{out}\n{err}"
    return [out for _, out, _ in results]


FAIL = """
try:
    comm.init_distributed(timeout=timedelta(seconds={seconds}), **{kwargs})
except CommError as error:
    print("FAILED", str(error).replace(chr(10), " / "))
    sys.exit(3)
print("CAME")
"""


def test_no_launcher_is_one_process_without_a_port():
    (out,) = ok(
        start(
            """
            import socket
            def refuse(*a, **k): raise AssertionError("a port was taken")
            dist.TCPStore = refuse
            assert not comm.is_initialized()
            comm.init_distributed()
            comm.init_distributed(dist_init_required=True)
            assert comm.is_initialized() and comm.is_available()
            assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
            assert [os.environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["0", "1", "0"]
            assert comm.get_all_ranks_from_group() == [0] and comm.get_global_rank() == 0
            t = torch.ones(2); comm.all_reduce(t); assert t.tolist() == [1, 1]
            assert dist.get_backend() == "gloo", dist.get_backend()
            comm.destroy_process_group(); comm.destroy_process_group()
            assert not comm.is_initialized()
            comm.init_distributed(verbose=False)
            mesh = comm.initialize_mesh_device((1, 1), ("dp", "sp"))
            assert mesh.mesh_dim_names == ("dp", "sp")
            assert comm.get_world_size(comm.new_group([0])) == 1
            print("done")
            """
        )
    )
    assert out == "done\n"


JOIN = """
comm.init_distributed(timeout=timedelta(seconds=30), verbose=False)
t = torch.tensor([comm.get_rank() + 1.0]); comm.all_reduce(t)
told = os.environ["MASTER_PORT"], os.environ["LOCAL_RANK"]
print(comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), t.item(), *told)
"""


@pytest.mark.parametrize(
    "variables",
    [
        lambda r, port: {"RANK": r, "WORLD_SIZE": 2, "LOCAL_RANK": r, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        lambda r, port: {"RANK": r, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port},
        lambda r, port: {
            "OMPI_COMM_WORLD_RANK": r,
            "OMPI_COMM_WORLD_SIZE": 2,
            "OMPI_COMM_WORLD_LOCAL_RANK": r,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
            "MASTER_PORT": port,
        },
        lambda r, port: {
            "SLURM_PROCID": r,
            "SLURM_STEP_NUM_TASKS": 2,
            "SLURM_LOCALID": r,
            "SLURM_STEP_NODELIST": "localhost",
            "MASTER_PORT": port,
        },
        lambda r, port: {"PMI_RANK": r, "PMI_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    ],
    ids=["torchrun", "no LOCAL_RANK", "Open MPI", "Slurm", "PMI"],
)
def test_two_ranks_join(variables):
    port = free_port()
    outs = ok(*(start(JOIN, **variables(r, port)) for r in range(2)))
    assert outs == [f"{r} 2 {r} 3.0 {port} {r}\n" for r in range(2)]


def test_ranks_by_argument_and_init_methods(tmp_path):
    body = """
    rank = int(sys.argv[1]) if len(sys.argv) > 1 else int(os.environ["ME"])
    comm.init_distributed(init_method=os.environ["METHOD"], rank=rank, world_size=2, timeout=timedelta(seconds=30))
    t = torch.tensor([rank + 1.0]); comm.all_reduce(t); assert t.item() == 3
    assert comm.get_local_rank() == rank
    comm.barrier()
    """
    for method in (f"tcp://127.0.0.1:{free_port()}", f"file://{tmp_path}/store"):
        ok(*(start(body, ME=r, METHOD=method) for r in range(2)))


def test_a_group_can_be_formed_again_over_a_store_that_lives_on():
    """torchrun's agent keeps one store for a worker's life; what an earlier group left in it must not be taken for the
    next one's.
    """
    port = free_port()
    agent = """
    store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), is_master=True, wait_for_workers=False)
    print("up", flush=True); sys.stdin.read()
    """
    body = """
    for i in range(3):
        comm.init_distributed(timeout=timedelta(seconds=30), verbose=False)
        t = torch.tensor([comm.get_rank() + 1.0]); comm.all_reduce(t); assert t.item() == 3
        comm.destroy_process_group()
    print("three")
    """
    server = start(agent, PORT=port)
    try:
        assert server.stdout.readline() == "up\n"
        common = {
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        assert ok(*(start(body, RANK=r, LOCAL_RANK=r, **common) for r in range(2))) == ["three\n"] * 2
    finally:
        server.kill()
        server.communicate()


def test_a_missing_rank_is_named_on_every_rank_within_the_limit():
    common = {"WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    body = FAIL.format(seconds=4, kwargs="{}")
    results = finish(*(start(body, RANK=r, LOCAL_RANK=r, **common) for r in (0, 1)), timeout=60)
    for rank, (code, out, err) in enumerate(results):
        assert code == 3 and "2 of 4 ranks came within 4 s; missing: rank 2, 3" in out, f"rank {rank}: {out}\n{err}"
        assert "Fix: look at the output of the missing ranks" in out


def test_rank_0_missing():
    body = FAIL.format(seconds=3, kwargs="{}")
    common = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ((code, out, err),) = finish(start(body, **common), timeout=50)
    assert code == 3 and "rank 1 of 2 could not reach rank 0 within 3 s" in out, out + err


def test_rank_0_dying_while_the_ranks_gather():
    port = free_port()
    common = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    other = start(FAIL.format(seconds=20, kwargs="{}"), RANK=1, LOCAL_RANK=1, **common)
    dying = start(
        """
        import threading
        def die():
            s = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False)
            s.wait(["deepspeed_c/1/here/1"], timedelta(seconds=30)); os._exit(9)
        threading.Timer(1, die).start()
        comm.init_distributed(timeout=timedelta(seconds=30))
        """,
        RANK=0,
        LOCAL_RANK=0,
        **common,
    )
    (code, out, err), (died, _, _) = finish(other, dying, timeout=50)
    assert died == 9 and code == 3 and "lost rank 0 while the ranks gathered" in out, out + err


def test_a_rank_claimed_twice():
    common = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    body = FAIL.format(seconds=30, kwargs="{}") + "sys.stdout.flush(); sys.stdin.read()"
    pair = [start(body, RANK=r, LOCAL_RANK=r, **common) for r in range(2)]
    try:
        assert [process.stdout.readline() for process in pair] == ["CAME\n"] * 2
        ((code, out, err),) = finish(start(body, RANK=1, **common))
        assert code == 3 and "two processes say that they are rank 1" in out, out + err
    finally:
        assert [code for code, _, _ in finish(*pair)] == [0, 0]


def test_a_taken_port():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        body = FAIL.format(seconds=5, kwargs="{}")
        common = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ((code, out, err),) = finish(start(body, **common), timeout=50)
    assert code == 3 and f"rank 0 cannot listen on port {port}" in out and "MASTER_PORT or --master_port" in out, (
        out + err
    )


@pytest.mark.parametrize(
    ("kwargs", "environ", "message"),
    [
        ("{}", {"RANK": 0, "WORLD_SIZE": 2}, "MASTER_ADDR, the host of rank 0, is not set"),
        ("{}", {"RANK": 2, "WORLD_SIZE": 2}, "rank 2 does not exist in a world of 2"),
        ("{'rank': 0}", {}, "one is given without the other"),
        ("{'rank': 3, 'world_size': 2}", {}, "rank 3 does not exist"),
        ("{'rank': 0, 'world_size': 2}", {}, "MASTER_ADDR"),
        ("{'dist_init_required': False}", {}, "not initialised, and dist_init_required=False"),
        ("{'dist_backend': 'carrier-pigeon'}", {}, "this torch has no 'carrier-pigeon' backend"),
        ("{'init_method': 'tcp://nowhere', 'rank': 0, 'world_size': 2}", {}, "names no host and port"),
    ],
)
def test_mistakes(kwargs, environ, message):
    ((code, out, err),) = finish(start(FAIL.format(seconds=5, kwargs=kwargs), **environ))
    assert code == 3 and message in out and "Fix:" in out, out + err


def test_wrong_timeouts_and_what_needs_a_group():
    ok(
        start(
            """
            from deepspeed_c.errors import ConfigError
            def fails(kind, text, function, *args, **kwargs):
                try: function(*args, **kwargs)
                except kind as error: assert text in str(error), error
                else: raise AssertionError("nothing was raised: " + text)
            for timeout in (5, timedelta(0)):
                fails(CommError, "timeout is", comm.init_distributed, timeout=timeout)
            for name in ("get_rank get_world_size get_local_rank get_world_group barrier get_all_ranks_from_group"
                         " new_group log_summary has_all_reduce_coalesced").split():
                function = getattr(comm, name)
                fails(CommError, "torch.distributed is not initialised", function)
            fails(CommError, "torch.distributed is not initialised", comm.all_reduce, torch.ones(1))
            os.environ["DEEPSPEED_TIMEOUT"] = "soon"
            fails(ConfigError, "DEEPSPEED_TIMEOUT", comm.init_distributed)
            os.environ["DEEPSPEED_TIMEOUT"] = "0.5"
            comm.init_distributed()
            from deepspeed_c.comm import groups
            assert groups._limits(None) == (timedelta(seconds=30), groups.ARRIVAL_TIMEOUT)
            for ranks in ([], [0, 0], [1], [-1]):
                fails(CommError, "no set of ranks", comm.new_group, ranks)
            fails(CommError, "asked to be rank 1 of 2", comm.init_distributed, rank=1, world_size=2)
            """
        )
    )


def test_mpi_discovery_sets_the_environment():
    (out,) = ok(
        start(
            """
            comm.mpi_discovery(verbose=False)
            print(*(os.environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")))
            """,
            OMPI_COMM_WORLD_RANK=1,
            OMPI_COMM_WORLD_SIZE=2,
            OMPI_COMM_WORLD_LOCAL_RANK=1,
            OMPI_COMM_WORLD_LOCAL_SIZE=2,
        )
    )
    assert out == "1 2 1 127.0.0.1 29500\n"


def test_a_users_own_group_is_kept():
    ok(
        start(
            """
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            group = dist.group.WORLD
            comm.init_distributed(dist_init_required=False)
            assert dist.group.WORLD is group and comm.get_world_group() is group and comm.is_initialized()
            """
        )
    )
