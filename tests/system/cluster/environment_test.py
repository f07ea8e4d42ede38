import pytest

from manualpar.system.cluster.environment import Assignment, find_assignment

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
OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://h:2", "OMPI_COMM_WORLD_SIZE": "4"}
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
        ((None, None, None), SLURM, ALL_DEVICES),
        ((None, None, None), SLURM | {"SLURM_STEP_NUM_NODES": "1"}, JAX_CHOOSES),
        ((None, None, None), SLURM | {"SLURM_NTASKS": "1"}, None),
        ((None, None, None), OPEN_MPI, JAX_CHOOSES),
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
