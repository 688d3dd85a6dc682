"""comm/groups.py: ranks find each other, and failures are reported within the time limit. Each case starts new
processes.
"""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from deepspeed_c import comm
from deepspeed_c.comm import groups
from deepspeed_c.errors import CommError, ConfigError
from deepspeed_c.listening import is_loopback
from tests.network import answers, own_address
from tests.ranks import RanksFailed, free_port, on_ranks

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "MPI_", "SLURM_", "MV2_", "TORCHELASTIC")
LONG = timedelta(seconds=200)  # on a busy machine ranks come late; a run without faults never waits so long


def bare(**environ):
    """Make torch.distributed uninitialised in this process, and set only ``environ`` of the variables of launchers."""
    dist.destroy_process_group()
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            del os.environ[name]
    os.environ.update({name: str(value) for name, value in environ.items()})


def torchrun(rank, world, port):
    return {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def refuse(*args, **kwargs):
    raise AssertionError("a port was taken")


def check_sum(rank, world):
    """Checks that the group works: a sum has the numbers of all ranks."""
    x = torch.tensor([rank + 1.0])
    comm.all_reduce(x)
    assert x.item() == world * (world + 1) / 2


@on_ranks(1, fresh=True)
def test_no_launcher_is_one_process_without_a_port(rank, world):
    bare()
    store, dist.TCPStore = dist.TCPStore, refuse
    try:
        assert not comm.is_initialized()
        comm.init_distributed()
        comm.init_distributed(dist_init_required=True)
        assert comm.is_initialized() and comm.is_available()
        assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
        assert [os.environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["0", "1", "0"]
        assert comm.get_all_ranks_from_group() == [0] and comm.get_global_rank() == 0
        check_sum(0, 1)
        comm.destroy_process_group()
        comm.destroy_process_group()
        assert not comm.is_initialized()
        comm.init_distributed(verbose=False)
    finally:
        dist.TCPStore = store
    mesh = comm.initialize_mesh_device((1, 1), ("dp", "sp"))
    assert mesh.mesh_dim_names == ("dp", "sp")
    assert comm.get_world_size(comm.new_group([0])) == 1
    if not torch.accelerator.is_available():
        assert dist.get_backend() == "gloo"


WAYS = {
    "torchrun": torchrun,
    "no LOCAL_RANK": lambda r, n, port: {"RANK": r, "WORLD_SIZE": n, "MASTER_ADDR": "localhost", "MASTER_PORT": port},
    "Open MPI": lambda r, n, port: {"OMPI_COMM_WORLD_RANK": r, "OMPI_COMM_WORLD_SIZE": n,
     "OMPI_COMM_WORLD_LOCAL_RANK": r, "OMPI_COMM_WORLD_LOCAL_SIZE": n, "MASTER_PORT": port},
    "Slurm": lambda r, n, port: {"SLURM_PROCID": r, "SLURM_STEP_NUM_TASKS": n, "SLURM_LOCALID": r,
     "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": port},
    "PMI": lambda r, n, port: {"PMI_RANK": r, "PMI_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
}  # fmt: skip


def join_body(rank, world, way, port):
    bare(**WAYS[way](rank, world, port))
    comm.init_distributed(timeout=LONG, verbose=False)
    check_sum(rank, world)
    assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (rank, world, rank)
    assert [os.environ[k] for k in ("RANK", "LOCAL_RANK", "MASTER_PORT")] == [str(rank), str(rank), str(port)]
    comm.barrier()


@pytest.mark.parametrize("way", WAYS)
def test_ranks_join(run_ranks, way):
    run_ranks(2, join_body, way, free_port(), fresh=True)


def host_body(rank, world, host, port):
    bare(**{**torchrun(rank, world, port), "MASTER_ADDR": host})
    comm.init_distributed(timeout=LONG, verbose=False)
    found = {
        address for address in ("127.0.0.1", "127.0.0.2", "::1", own_address()) if address and answers(address, port)
    }
    comm.barrier()
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "127.0.0.2", "own", "name"])
def test_rank_0_listens_where_the_others_look_for_it(run_ranks, host):
    own = own_address()
    if host == "own":
        host = own or "127.0.0.1"
    elif host == "name":
        host = socket.gethostname()
    seen = run_ranks(2, host_body, host, free_port(), fresh=True)
    if host != socket.gethostname():
        assert seen == [{host}] * 2
    else:
        # Other hosts may resolve the name differently, unless the address can be reached from them.
        means = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
        assert (
            seen == [{"127.0.0.1", "127.0.0.2", "::1", *([own] if own else [])} if is_loopback(means) else {means}] * 2
        )


def arguments_body(rank, world, method):
    bare()
    comm.init_distributed(init_method=method, rank=rank, world_size=world, timeout=LONG)
    check_sum(rank, world)
    assert comm.get_local_rank() == rank
    comm.barrier()


@pytest.mark.parametrize("method", ["tcp", "file"])
def test_ranks_by_argument_and_init_methods(run_ranks, tmp_path, method):
    where = f"tcp://127.0.0.1:{free_port()}" if method == "tcp" else f"file://{tmp_path}/store"
    run_ranks(2, arguments_body, where, fresh=True)


def again_body(rank, world, port):
    bare(**torchrun(rank, world, port), TORCHELASTIC_USE_AGENT_STORE="True")
    for _ in range(3):
        comm.init_distributed(timeout=LONG, verbose=False)
        check_sum(rank, world)
        comm.destroy_process_group()


def test_a_group_can_be_formed_again_over_a_store_that_lives_on(run_ranks):
    """torchrun's agent keeps one store for the life of a worker. The keys that a group leaves must not be taken for
    keys of the next group.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(2, again_body, store.port, fresh=True)


ARRIVAL_S = 8  # both ranks come within this time, however busy the machine is


def missing_body(rank, world, port):
    bare(**torchrun(rank, 4, port))
    with pytest.raises(CommError) as caught:
        comm.init_distributed(timeout=timedelta(seconds=ARRIVAL_S))
    return str(caught.value)


def test_missing_ranks_are_named_on_every_rank_within_the_limit(run_ranks):
    for rank, message in enumerate(run_ranks(2, missing_body, free_port(), fresh=True)):
        assert f"2 of 4 ranks came within {ARRIVAL_S} s; missing: rank 2, 3" in message, f"rank {rank}: {message}"
        assert "Fix: look at the output of the missing ranks" in message


def no_host_body(rank, world, port):
    bare(**torchrun(1, 2, port))
    with pytest.raises(CommError, match="rank 1 of 2 could not reach rank 0 within 2 s"):
        comm.init_distributed(timeout=timedelta(seconds=2))


def test_rank_0_missing(run_ranks):
    run_ranks(1, no_host_body, free_port(), fresh=True)


def dying_body(rank, world, port):
    bare(**torchrun(rank, 3, port))
    if rank == 0:

        def die():
            store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
            store.wait(["deepspeed_c/1/here/1"], LONG)
            os._exit(9)

        threading.Timer(0.5, die).start()
        comm.init_distributed(timeout=LONG)
    with pytest.raises(CommError, match="lost rank 0 while the ranks gathered"):
        comm.init_distributed(timeout=LONG)


def test_rank_0_dying_while_the_ranks_gather(run_ranks):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, dying_body, free_port(), fresh=True, grace=200)
    assert [outcome.kind for outcome in failed.value.outcomes] == ["died", "returned"], str(failed.value)


def twice_body(rank, world, port, meeting_port):
    claimed = min(rank, 1)
    bare(**torchrun(claimed, 2, port))
    meeting = dist.TCPStore("127.0.0.1", meeting_port, is_master=rank == 0, timeout=LONG, wait_for_workers=False)
    if rank == 2:
        meeting.wait(["formed"], LONG)
        with pytest.raises(CommError, match="two processes say that they are rank 1"):
            comm.init_distributed(timeout=LONG)
        meeting.set("refused", "")
    else:
        comm.init_distributed(timeout=LONG, verbose=False)
        meeting.set("formed", "")
        meeting.wait(["refused"], LONG)
        check_sum(claimed, 2)


def test_a_rank_claimed_twice(run_ranks):
    run_ranks(3, twice_body, free_port(), free_port(), fresh=True)


def taken_body(rank, world, port):
    bare(**torchrun(0, 2, port))
    with pytest.raises(CommError, match=f"rank 0 cannot listen on port {port}") as caught:
        comm.init_distributed(timeout=timedelta(seconds=5))
    assert "MASTER_PORT or --master_port" in caught.value.fix


def test_a_taken_port(run_ranks):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        run_ranks(1, taken_body, taken.getsockname()[1], fresh=True)


MISTAKES = [
    ({}, {"RANK": 0, "WORLD_SIZE": 2}, "MASTER_ADDR, the host of rank 0, is not set"),
    ({}, {"RANK": 2, "WORLD_SIZE": 2}, "rank 2 does not exist in a world of 2"),
    ({"rank": 0}, {}, "one is given without the other"),
    ({"rank": 3, "world_size": 2}, {}, "rank 3 does not exist"),
    ({"rank": 0, "world_size": 2}, {}, "MASTER_ADDR"),
    ({"dist_init_required": False}, {}, "not initialised, and dist_init_required=False"),
    ({"dist_backend": "carrier-pigeon"}, {}, "this torch has no 'carrier-pigeon' backend"),
    ({"init_method": "tcp://nowhere", "rank": 0, "world_size": 2}, {}, "names no host and port"),
    ({"timeout": 5}, {}, "timeout is 5"),
    ({"timeout": timedelta(0)}, {}, "timeout is datetime.timedelta"),
]


@on_ranks(1, fresh=True)
def test_mistakes(rank, world):
    dist.destroy_process_group()
    for kwargs, environ, message in MISTAKES:
        for name in list(os.environ):
            if name.startswith(LAUNCHERS):
                del os.environ[name]
        os.environ.update({name: str(value) for name, value in environ.items()})
        with pytest.raises(CommError, match=message) as caught:
            comm.init_distributed(**kwargs)
        assert caught.value.fix and not comm.is_initialized()


@on_ranks(1, fresh=True)
def test_what_needs_a_group_says_so(rank, world):
    bare()
    for name in [
        "get_rank",
        "get_world_size",
        "get_local_rank",
        "get_world_group",
        "barrier",
        "get_all_ranks_from_group",
        "get_global_rank",
        "new_group",
        "log_summary",
        "has_all_reduce_coalesced",
    ]:
        with pytest.raises(CommError, match="torch.distributed is not initialised"):
            getattr(comm, name)()
    with pytest.raises(CommError, match="all_reduce: torch.distributed is not initialised"):
        comm.all_reduce(torch.ones(1))


@on_ranks(1, fresh=True)
def test_limits(rank, world):
    bare(DEEPSPEED_TIMEOUT="soon")
    with pytest.raises(ConfigError, match="DEEPSPEED_TIMEOUT"):
        comm.init_distributed()
    os.environ["DEEPSPEED_TIMEOUT"] = "0.5"
    assert groups._limits(None) == (timedelta(seconds=30), groups.ARRIVAL_TIMEOUT)
    del os.environ["DEEPSPEED_TIMEOUT"]
    assert groups._limits(None) == (timedelta(minutes=10), timedelta(seconds=60))
    assert groups._limits(timedelta(seconds=3)) == (timedelta(seconds=3),) * 2
    comm.init_distributed()
    for ranks in ([], [0, 0], [1], [-1]):
        with pytest.raises(CommError, match="no set of ranks"):
            comm.new_group(ranks)
    with pytest.raises(CommError, match="asked to be rank 1 of 2"):
        comm.init_distributed(rank=1, world_size=2)


@on_ranks(1, fresh=True)
def test_mpi_discovery_sets_the_environment(rank, world):
    bare(**{f"OMPI_COMM_WORLD_{k}": v for k, v in {"RANK": 1, "SIZE": 2, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}.items()})
    comm.mpi_discovery(verbose=False)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["1", "2", "1", "127.0.0.1", "29500"]


@on_ranks(1, fresh=True)
def test_a_users_own_group_is_kept(rank, world):
    bare()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    comm.init_distributed(dist_init_required=False)
    assert dist.group.WORLD is group and comm.get_world_group() is group and comm.is_initialized()
