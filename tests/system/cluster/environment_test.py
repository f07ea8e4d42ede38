import os
import subprocess
import sys

import pytest

from manualpar.system.cluster.environment import Assignment, find_assignment
from manualpar.system.cluster.managed import find_place, first_node

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
