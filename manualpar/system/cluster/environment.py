"""Finds this process's number and the other processes: from arguments or environment variables.

A user sets the variables of manualpar, and a cluster sets its own variables. Those of Slurm, of
Open MPI 4 and of TPUs on GKE give all values (`launchers`). Other clusters have variables from
which this module only finds out whether there are several processes; JAX then finds the processes
(`jax.distributed.initialize`): Kubernetes jobs and Cloud TPU machines.
"""

import dataclasses
from collections.abc import Mapping

from manualpar.system.cluster import launchers

COORDINATOR_VARIABLE = "MANUALPAR_COORDINATOR_ADDRESS"
COUNT_VARIABLE = "MANUALPAR_NUM_PROCESSES"
ID_VARIABLE = "MANUALPAR_PROCESS_ID"
# With this value in place of an address, JAX looks for a cluster even if this module finds no
# variable that a cluster sets.
AUTO = "auto"

# Launchers that JAX cannot ask, by the variable in which they give the number of processes.
MPI_SIZES = {"OMPI_COMM_WORLD_SIZE": "Open MPI 5", "PMI_SIZE": "MPICH or Intel MPI"}

MEND = (
    "Give --coordinator_address=<host of process 0>:<free port>, --num_processes and --process_id, "
    f"or {COORDINATOR_VARIABLE}, {COUNT_VARIABLE} and {ID_VARIABLE}"
)


@dataclasses.dataclass(frozen=True)
class Assignment:
    """This process's place in a run; JAX finds the values of the fields that are `None`."""

    coordinator_address: str | None  # `host:port` of JAX's coordination service.
    num_processes: int | None
    process_id: int | None
    # Whether this process uses all devices of its host. If not, JAX chooses: in Slurm and Open MPI
    # it gives one device to each process.
    sees_all_devices: bool
    # If JAX has to find the processes: the variable or flag that shows that there are several.
    evidence: str = dataclasses.field(default="", compare=False)
    # The name of the cluster in JAX, if the values are from the cluster's variables.
    manager: str = ""


def find_assignment(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    environment: Mapping[str, str],
) -> Assignment | None:
    """Finds this process's place in a run, see `initialize`; `None` for a single process."""
    sees_all = "JAX_LOCAL_DEVICE_IDS" not in environment
    evidence = "--coordinator_address=auto" if coordinator_address == AUTO else ""
    evidence = evidence or _evidence(environment)
    found_by_jax = Assignment(
        None, None, None, sees_all and _is_alone_on_host(environment), evidence
    )
    if coordinator_address == AUTO:
        if num_processes is not None or process_id is not None:
            raise ValueError(
                "initialize: coordinator_address='auto' comes with num_processes="
                f"{num_processes} and process_id={process_id}, expected neither: JAX finds all "
                "three. Leave them out, or give an address."
            )
        return _managed(environment, found_by_jax) or found_by_jax
    if num_processes == 1 and coordinator_address is None and process_id in (None, 0):
        return None
    flags = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    if set(flags.values()) != {None}:
        return _check(flags, sees_all)
    names = (COORDINATOR_VARIABLE, COUNT_VARIABLE, ID_VARIABLE)
    variables: dict[str, str | int | None] = {name: environment.get(name) for name in names}
    jax_address = environment.get("JAX_COORDINATOR_ADDRESS")
    if COORDINATOR_VARIABLE in environment or any(variables.values()):
        address, count, process = variables.values()
        if (address or jax_address, count, process) == (None, "1", None):
            return None
        return _check(variables | {COORDINATOR_VARIABLE: address or jax_address}, sees_all)
    if evidence:
        return _managed(environment, found_by_jax) or found_by_jax
    if jax_address:
        raise ValueError(
            "initialize: JAX_COORDINATOR_ADDRESS is set without the number of processes and the "
            f"number of this process. Set {COUNT_VARIABLE} and {ID_VARIABLE} too, or unset "
            "JAX_COORDINATOR_ADDRESS."
        )
    for name, launcher in MPI_SIZES.items():
        if _number(environment, name) > 1:
            raise ValueError(
                f"initialize: {name}={environment[name]} says that {launcher} started several "
                f"processes, but {launcher} does not give the address of process 0. {MEND}; "
                "--num_processes=1 makes each process a separate run."
            )
    return None


def _managed(environment: Mapping[str, str], found_by_jax: Assignment) -> Assignment | None:
    """Makes an `Assignment` from the variables of a cluster; `None` if they are not enough."""
    if (place := launchers.find_place(environment)) is None:
        return None
    found = _check(dict(zip(place.names, place.values, strict=True)), found_by_jax.sees_all_devices)
    return dataclasses.replace(found, evidence=found_by_jax.evidence, manager=place.manager)


def _check(arguments: Mapping[str, str | int | None], sees_all: bool) -> Assignment:
    """Makes an `Assignment` from the coordinator's address, the process count and the process id.

    The keys of `arguments` are the names of these flags or variables, for messages.
    """
    missing = [name for name, value in arguments.items() if value in (None, "")]
    present = [name for name in arguments if name not in missing]
    if missing:
        raise ValueError(
            f"initialize: {' and '.join(present)} given without {' and '.join(missing)}, expected "
            f"all three or none. {MEND}."
        )
    (address_name, address), (count_name, count_text), (id_name, id_text) = arguments.items()
    host, colon, port = str(address).rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(
            f"initialize: {address_name}={address!r}, expected <host>:<port> such as "
            "'10.0.0.1:1234'."
        )
    try:
        count, process = int(str(count_text)), int(str(id_text))
    except ValueError as error:
        raise ValueError(
            f"initialize: {count_name}={count_text!r} and {id_name}={id_text!r}, expected integers."
        ) from error
    if not 0 <= process < count:
        raise ValueError(
            f"initialize: {id_name}={process} with {count_name}={count}, expected a number from 0 "
            f"to {count_name} - 1, a different number in each process."
        )
    return Assignment(str(address), count, process, sees_all)


def _evidence(environment: Mapping[str, str]) -> str:
    """Returns, as `NAME=value`, a variable that a cluster of several processes has set.

    Returns "" if there is none. Only clusters that JAX can find count.
    """
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
    in_slurm = all(name in environment for name in slurm)
    in_open_mpi = "OMPI_MCA_orte_hnp_uri" in environment
    tpu_hosts = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
    tpu = next((name for name in tpu_hosts if environment.get(name)), "")
    found = {
        "SLURM_NTASKS": in_slurm and _number(environment, "SLURM_NTASKS") > 1,
        "OMPI_COMM_WORLD_SIZE": in_open_mpi and _number(environment, "OMPI_COMM_WORLD_SIZE") > 1,
        # An indexed job of Kubernetes. A job with a single pod must set --num_processes=1.
        "JOB_COMPLETION_INDEX": {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"}
        <= environment.keys(),
        tpu: "," in environment.get(tpu, ""),
        "MEGASCALE_NUM_SLICES": _number(environment, "MEGASCALE_NUM_SLICES") > 1,
    }
    return next((f"{name}={environment[name]}" for name, is_there in found.items() if is_there), "")


def _is_alone_on_host(environment: Mapping[str, str]) -> bool:
    """Returns whether Slurm or Open MPI started one process for all devices of a host."""
    tasks = _number(environment, "SLURM_NTASKS")
    nodes = _number(environment, "SLURM_STEP_NUM_NODES")
    return (tasks == nodes > 0) or _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") == 1


def _number(environment: Mapping[str, str], name: str) -> int:
    """Returns the number in an environment variable; 0 if the variable has no number."""
    value = environment.get(name, "")
    return int(value) if value.isdigit() else 0
