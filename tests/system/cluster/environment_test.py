import dataclasses
import os
import subprocess
import sys

import pytest

from manualpar.system.cluster.environment import Assignment, find_assignment
from manualpar.system.cluster.launchers import find_place, first_node

OURS = {
    "MANUALPAR_COORDINATOR_ADDRESS": "a:1",
    "MANUALPAR_NUM_PROCESSES": "2",
    "MANUALPAR_PROCESS_ID": "1",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "2",
}
SLURMS = Assignment("node1:61447", 2, 0, True, manager="slurm")
OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://h:2", "OMPI_COMM_WORLD_SIZE": "4"}
RANK = {
    "OMPI_MCA_orte_hnp_uri": "32768.0;tcp://10.0.0.1,10.1.0.1:34911",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
GKE = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}
SLICES = {
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "s0:8080",
}
ALL_DEVICES = Assignment(None, None, None, sees_all_devices=True)
JAX_CHOOSES = Assignment(None, None, None, sees_all_devices=False)


@pytest.mark.parametrize(
    ("given", "environment", "place"),
    [
        ((None, None, None), {}, None),
        ((None, 1, None), OURS, None),
        ((None, 1, None), SLURM, None),
        (("h:5", 3, 2), OURS, Assignment("h:5", 3, 2, True)),
        (("[::1]:5", 1, 0), {}, Assignment("[::1]:5", 1, 0, True)),
        ((None, None, None), OURS, Assignment("a:1", 2, 1, True)),
        ((None, None, None), OURS | {"JAX_LOCAL_DEVICE_IDS": "1"}, Assignment("a:1", 2, 1, False)),
        ((None, None, None), SLURM, SLURMS),
        (
            (None, None, None),
            SLURM | {"SLURM_STEP_NUM_NODES": "1"},
            Assignment("node1:61447", 2, 0, False, manager="slurm"),
        ),
        ((None, None, None), SLURM | {"SLURM_NTASKS": "1"}, None),
        (
            ("auto", None, None),
            SLURM | {"JAX_COORDINATOR_PORT": "5"},
            Assignment("node1:5", 2, 0, True, manager="slurm"),
        ),
        ((None, None, None), OPEN_MPI, JAX_CHOOSES),
        (
            (None, None, None),
            OPEN_MPI | RANK,
            Assignment("10.0.0.1:61448", 4, 3, False, manager="ompi"),
        ),
        ((None, None, None), GKE, Assignment("a:8482", 2, 1, False, manager="tpu")),
        ((None, None, None), GKE | SLICES, Assignment("s0:8482", 6, 5, False, manager="tpu")),
        # Process 0's host is not known.
        ((None, None, None), GKE | {"MEGASCALE_NUM_SLICES": "3"}, JAX_CHOOSES),
        ((None, None, None), OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ALL_DEVICES),
        ((None, None, None), {"TPU_WORKER_HOSTNAMES": "a,b"}, JAX_CHOOSES),
        ((None, None, None), {"TPU_WORKER_HOSTNAMES": "a"}, None),
        (("auto", None, None), {}, JAX_CHOOSES),
    ],
)
def test_who_the_processes_are(given, environment, place):
    assert find_assignment(*given, environment) == place


# The variables that a process finds, in the formats that the cluster classes of JAX 0.10.2 read.
SLURM_STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[001-002]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911",
}
OPEN_MPI_5 = {name: text for name, text in OPEN_MPI_4.items() if "orte" not in name}
MPICH = {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0", "PMI_RANK": "1", "PMI_SIZE": "2"}
POD = {"HOSTNAME": "train-workers-0-1-x7k2p", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
JOBSET = POD | {"JOB_COMPLETION_INDEX": "1"}
GKE_TPU = JOBSET | {
    "TPU_WORKER_HOSTNAMES": "t-0.train,t-1.train,t-2.train,t-3.train",
    "TPU_WORKER_ID": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_TOPOLOGY": "4x4",
}
TPU_ADDRESSES = {"TPU_PROCESS_ADDRESSES": "t-0:8471,t-1:8471", "TPU_WORKER_ID": "0"}
TWO_SLICES = {
    "MEGASCALE_COORDINATOR_ADDRESS": "train-slice-job-0-0.train",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_PORT": "8081",
    "MEGASCALE_SLICE_ID": "1",
}
ONE_HOST_SLICES = TWO_SLICES | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
# A Cloud TPU machine outside Kubernetes: only the metadata server knows the others.
CLOUD_TPU = {"TPU_ACCELERATOR_TYPE": "v5litepod-16", "TPU_RUNTIME_METRICS_PORTS": "8431"}

IN_SLURM = Assignment("node001:62055", 2, 0, True, manager="slurm")
IN_OPEN_MPI = Assignment("10.96.0.1:62624", 2, 1, True, manager="ompi")


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (SLURM_STEP, IN_SLURM),
        (SLURM_STEP | {"SLURM_STEP_NODELIST": "node001,host2"}, IN_SLURM),
        (
            SLURM_STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "1"},
            dataclasses.replace(IN_SLURM, sees_all_devices=False),
        ),
        # Slurm's own plugin for MPICH sets these variables too.
        (SLURM_STEP | MPICH, IN_SLURM),
        # A batch script without srun: one process.
        ({name: text for name, text in SLURM_STEP.items() if "STEP" not in name}, None),
        (OPEN_MPI_4, IN_OPEN_MPI),
        (
            OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620::2]:43370"},
            dataclasses.replace(IN_OPEN_MPI, coordinator_address="[fe80::b9b]:62880"),
        ),
        (
            OPEN_MPI_4 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            dataclasses.replace(IN_OPEN_MPI, sees_all_devices=False),
        ),
        (OPEN_MPI_5 | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        (MPICH | {"PMI_SIZE": "1"}, None),
        (POD, None),
        (JOBSET, JAX_CHOOSES),
        (JOBSET | OURS, Assignment("a:1", 2, 1, True)),
        (GKE_TPU, Assignment("t-0.train:8482", 4, 1, False, manager="tpu")),
        (
            GKE_TPU | TWO_SLICES,
            Assignment("train-slice-job-0-0.train:8482", 8, 5, False, manager="tpu"),
        ),
        (TPU_ADDRESSES, Assignment("t-0:8482", 2, 0, False, manager="tpu")),
        (TPU_ADDRESSES | {"TPU_PROCESS_ADDRESSES": "t-0:8471"}, None),
        (
            ONE_HOST_SLICES,
            Assignment("train-slice-job-0-0.train:8482", 2, 1, False, manager="tpu"),
        ),
        (ONE_HOST_SLICES | {"MEGASCALE_NUM_SLICES": "1"}, None),
        (CLOUD_TPU, None),
    ],
)
def test_what_clusters_set_is_understood(environment, place):
    assert find_assignment(None, None, None, environment) == place
    # Several processes on a Cloud TPU pod need `auto`; elsewhere it changes nothing.
    if place is not None and place.coordinator_address is None:
        assert find_assignment("auto", None, None, environment) == place


@pytest.mark.parametrize(
    ("environment", "launcher"), [(OPEN_MPI_5, "Open MPI 5"), (MPICH, "MPICH or Intel MPI")]
)
def test_a_launcher_that_jax_cannot_ask_is_refused(environment, launcher):
    with pytest.raises(ValueError, match=f"says that {launcher} started several processes"):
        find_assignment(None, None, None, environment)
    given = find_assignment("10.0.0.1:1234", 2, 1, environment)
    assert given == Assignment("10.0.0.1:1234", 2, 1, True)
    assert find_assignment(None, 1, None, environment) is None


@pytest.mark.parametrize(
    ("environment", "evidence"),
    [
        (SLURM, "SLURM_NTASKS=2"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE=4"),
        ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX=3"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_HOSTNAMES=a,b"),
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, "TPU_PROCESS_ADDRESSES=a:1,b:1"),
        ({"MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_NUM_SLICES=2"),
    ],
)
def test_what_says_that_there_are_several_is_kept_for_an_error(environment, evidence):
    assert find_assignment(None, None, None, environment).evidence == evidence
    assert find_assignment("auto", None, None, environment).evidence == "--coordinator_address=auto"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-015],host2", "node001"),
        ("node[001,007-015]-ib,host2", "node001-ib"),
        ("rack[1-2]n[03,05]", "rack1n03"),
    ],
)
def test_the_first_node_of_slurm(nodes, first):
    assert first_node(nodes) == first


def test_open_mpi_may_listen_at_an_ipv6_address():
    uri = "4096.0;tcp6://[fe80::1,2620::3]:43370"
    place = find_place(RANK | {"OMPI_MCA_orte_hnp_uri": uri, "OMPI_COMM_WORLD_SIZE": "4"})
    assert place.values == ("[fe80::1]:61441", "4", "3")


@pytest.mark.slow
@pytest.mark.parametrize("environment", [SLURM, OPEN_MPI | RANK], ids=["slurm", "ompi"])
def test_jax_finds_the_same_coordinator(environment):
    """JAX shows in its log where process 1 would look for the others."""
    script = (
        "import logging, jax; logging.basicConfig(level='INFO')\n"
        "jax.distributed.initialize(initialization_timeout=1)"
    )
    number = {"SLURM_PROCID": "1", "OMPI_COMM_WORLD_RANK": "1"}
    variables = {**os.environ, **environment, **number, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False
    )
    assert f"Connecting to JAX distributed service on {find_place(environment).values[0]}" in (
        ended.stderr
    )
