"""comm/discover.py: the rank and place of a process, from the variables that each launcher sets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types

import pytest

from deepspeed_c.comm.discover import DEFAULT_PORT, LaunchPlace, discover, local_rank_of
from deepspeed_c.errors import CommError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "1234"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
}


def test_nothing_set_is_one_process():
    assert discover({})[:5] == (0, 1, 0, None, None)


def test_torchrun():
    assert discover(TORCHRUN) == LaunchPlace(3, 8, 1, "node7", 1234, "environment")
    assert discover({**TORCHRUN, **OPEN_MPI})[:2] == (3, 8), "what a launcher for torch says wins over MPI's"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 2, 1, "127.0.0.1", DEFAULT_PORT)),
        ({**OPEN_MPI, "MASTER_ADDR": "a"}, (1, 2, 1, "a", DEFAULT_PORT)),
        ({**OPEN_MPI, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, (1, 2, 1, "10.0.0.4", DEFAULT_PORT)),
        ({**OPEN_MPI, "AZ_BATCHAI_MPI_MASTER_NODE": "b"}, (1, 2, 1, "b", DEFAULT_PORT)),
        ({f"MV2_COMM_WORLD_{k}": v for k, v in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2"))},
         (0, 2, 0, "127.0.0.1", DEFAULT_PORT)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
         (1, 2, 1, "127.0.0.1", DEFAULT_PORT)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a"}, (1, 2, None, "a", DEFAULT_PORT)),
        (SLURM, (5, 8, 1, "gpu07", 12000 + 4711)),
        ({**SLURM, "MASTER_PORT": "77", "MASTER_ADDR": "x"}, (5, 8, 1, "x", 77)),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else next(iter(value)),
)  # fmt: skip
def test_other_launchers(environ, expected):
    assert discover(environ)[:5] == expected


def test_a_given_port_wins_over_slurms():
    assert discover(SLURM, distributed_port=40001).master_port == 40001


def test_slurm_ports_stay_in_range_and_differ_for_neighbours():
    ports = [discover({**SLURM, "SLURM_JOB_ID": str(job)}).master_port for job in (0, 1, 19999, 20000, 123456789)]
    assert all(12000 <= port < 32000 for port in ports) and ports[0] != ports[1]


def test_a_batch_script_without_srun_is_one_process():
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_NODELIST": "a"}
    assert discover(batch)[:3] == (0, 1, 0)


def test_without_discovery_only_rank_and_world_size_count():
    assert discover(OPEN_MPI, auto_mpi_discovery=False)[:2] == (0, 1)
    assert discover(TORCHRUN, auto_mpi_discovery=False)[:2] == (3, 8)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, r"RANK is set \(0\) and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE is set \(2\) and RANK is not"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 does not exist in a world of 8"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is '-1'"),
        ({**TORCHRUN, "RANK": "one"}, "RANK is 'one'"),
        ({**TORCHRUN, "RANK": ""}, "RANK is ''"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, the host of rank 0, is not set"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR, the host of rank 0, is not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "MASTER_ADDR, the host of rank 0, is not set"),
    ],
)
def test_mistakes_are_named(environ, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(CommError, match=message) as caught:
        discover(environ)
    assert caught.value.fix


def test_one_process_needs_no_master():
    assert discover({"RANK": "0", "WORLD_SIZE": "1"})[:5] == (0, 1, 0, None, None)


def test_mpi_is_asked_where_mpi4py_is(monkeypatch):
    comm = types.SimpleNamespace(bcast=lambda value, root: f"host-of-{root}")
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=types.SimpleNamespace(COMM_WORLD=comm)))
    assert discover(OPEN_MPI).master_addr == "host-of-0"


def test_local_rank_of():
    assert local_rank_of({}) == 0
    assert local_rank_of({"LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}) == 2
    assert local_rank_of(SLURM) == 1
    with pytest.raises(CommError, match="LOCAL_RANK is 'x'"):
        local_rank_of({"LOCAL_RANK": "x"})


# What the launchers of Debian 12 leave in the environment of a process (`env | grep MPI`), without the variables that
# differ from run to run.
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_UNIVERSE_SIZE": "4",
    "OMPI_MCA_orte_hnp_uri": "1676541952.0;tcp://192.0.2.2:53343",
    "PMIX_HOSTNAME": "host-1",
    "PMIX_NAMESPACE": "1676541953",
    "PMIX_RANK": "2",
    "PMIX_SERVER_URI2": "1676541952.0;tcp4://127.0.0.1:43809",
}
OPEN_MPI_5 = {
    **{name: value for name, value in OPEN_MPI_4.items() if not name.startswith("OMPI_MCA_orte")},
    "PMIX_NAMESPACE": "prterun-host-0-3856@1",
    "PMIX_SERVER_URI41": "prterun-host-0-3856@0.1;tcp4://127.0.0.1:43809",
}
HYDRA = {
    "HYDI_CONTROL_FD": "7",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "host-0",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
SLURM_PMIX = {
    **SLURM,
    "PMIX_RANK": "5",
    "PMIX_NAMESPACE": "slurm.pmix.4711.0",
    "PMIX_HOSTNAME": "gpu08",
    "SLURM_PMIXP_ABORT_AGENT_PORT": "40001",
}
SLURM_PMI2 = {**SLURM, "PMI_FD": "8", "PMI_JOBID": "4711.0", "PMI_RANK": "5", "PMI_SIZE": "8"}
PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "RANK": "2",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}
TRAINER = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "2",
    "PET_NODE_RANK": "2",
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**OPEN_MPI_4, "MASTER_ADDR": "a"}, (2, 4, 0, "a", DEFAULT_PORT, "Open MPI")),
        ({**OPEN_MPI_5, "MASTER_ADDR": "a"}, (2, 4, 0, "a", DEFAULT_PORT, "Open MPI")),
        (HYDRA, (1, 2, 1, "127.0.0.1", DEFAULT_PORT, "PMI")),
        (SLURM_PMIX, (5, 8, 1, "gpu07", 16711, "Slurm")),
        (SLURM_PMI2, (5, 8, 1, "gpu07", 16711, "Slurm")),
        # Hydra starts its proxies by srun, one a host; the ranks are Hydra's
        ({**HYDRA, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "a[1-2]"},
         (1, 2, 1, "127.0.0.1", DEFAULT_PORT, "PMI")),
        ({**OPEN_MPI_4, **SLURM, "MASTER_ADDR": "a"}, (2, 4, 0, "a", DEFAULT_PORT, "Open MPI")),
        (PYTORCHJOB, (2, 3, None, "job-master-0", 23456, "environment")),
        ({**PYTORCHJOB, "PET_NODE_RANK": "2", "PET_NNODES": "3", "PET_NPROC_PER_NODE": "1"},
         (2, 3, 0, "job-master-0", 23456, "environment")),
        (TRAINER, (2, 4, 0, "job-node-0-0.job", 29400, "Kubernetes (PET_*)")),
        # torchrun and our launcher in such pods
        ({**TRAINER, "PET_NPROC_PER_NODE": "2", **TORCHRUN}, (3, 8, 1, "node7", 1234, "environment")),
        ({**TRAINER, "PET_NNODES": "1", "PET_NODE_RANK": "0"}, (0, 1, 0, None, None, "Kubernetes (PET_*)")),
        ({"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7"},
         (1, 2, 0, "a", 7, "Kubernetes (JOB_COMPLETION_INDEX)")),
    ],
    ids=range(13),
)  # fmt: skip
def test_environments_of_clusters(environ, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    found = discover(environ)
    print(found, expected)
    assert found == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (OPEN_MPI_4, "4 processes were started by Open MPI, and MASTER_ADDR"),
        ({**HYDRA, "PMI_SIZE": "3"}, "3 processes were started by PMI, and MASTER_ADDR"),
        # prterun says no number
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-host-0-3856@1"}, r"PMIX_RANK is set \(1\)"),
        ({**TRAINER, "PET_NPROC_PER_NODE": "2"}, "asks for 2 processes a pod"),
        (
            {**PYTORCHJOB, "PET_NODE_RANK": "2", "PET_NNODES": "3", "PET_NPROC_PER_NODE": "2"},
            "asks for 2 processes a pod",
        ),
        ({**TRAINER, "RANK": "1"}, r"RANK is set \(1\) and WORLD_SIZE is not"),
    ],
    ids=range(6),
)
def test_what_a_cluster_leaves_out_is_an_error(environ, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(CommError, match=message) as caught:
        discover(environ)
    assert caught.value.fix


LEFT_OVER = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({**OPEN_MPI_4, **LEFT_OVER}, ("RANK=1", "WORLD_SIZE=4", "OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=4")),
        ({**HYDRA, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, ("RANK=0", "PMI_RANK=1")),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a"}, ("RANK=0", "SLURM_PROCID=5")),
    ],
    ids=range(3),
)
def test_two_launchers_that_contradict_are_both_named(environ, names):
    with pytest.raises(CommError) as caught:
        discover(environ)
    print(caught.value)
    assert all(name in str(caught.value) for name in names)
    # what torchrun or our launcher has set inside a step or under mpirun, or what is not read, contradicts nothing
    for name in ("TORCHELASTIC_RUN_ID", "DSC_RUN_TOKEN"):
        assert discover({**environ, name: "x"})[0] == int(environ["RANK"])
    assert discover(environ, auto_mpi_discovery=False)[0] == int(environ["RANK"])


def test_launchers_of_two_levels_agree():
    # `export RANK=$OMPI_COMM_WORLD_RANK`, and ranks of another world than the step's tasks
    assert discover({**OPEN_MPI_4, **LEFT_OVER, "RANK": "2"})[:2] == (2, 4)
    assert discover({**SLURM, **LEFT_OVER})[:2] == (1, 4)
    assert discover({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", **LEFT_OVER})[:2] == (1, 4)


def test_pods_are_not_read_without_discovery():
    assert discover(TRAINER, auto_mpi_discovery=False)[:2] == (0, 1)


@pytest.mark.parametrize(
    ("program", "words", "package"),
    [("mpirun.openmpi", ["--oversubscribe"], "openmpi-bin"), ("mpirun.mpich", [], "mpich")],
    ids=["openmpi", "mpich"],
)
def test_an_mpirun_that_is_installed(program, words, package, tmp_path):
    """Ranks of one host, from the variables that they find."""
    if shutil.which(program) is None:
        pytest.skip(f"no MPI can be run here: {package} is not installed")
    strangers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "MPI", "SLURM_", "MV2_", "PET_", "JOB_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(strangers)}
    variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [program, *words, "-n", "3", "sh", "-c", f"env -0 > {tmp_path}/$$"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    environs = [dict(line.split("=", 1) for line in file.read_text().split("\0")[:-1]) for file in tmp_path.iterdir()]
    places = sorted(discover(environ)[:5] for environ in environs)
    print(places)
    assert places == [(rank, 3, rank, "127.0.0.1", DEFAULT_PORT) for rank in range(3)]
