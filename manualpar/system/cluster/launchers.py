"""Finds the processes of a run from the variables that Slurm, Open MPI 4 and TPUs on GKE set.

The coordinator is on the host, and at the port, that JAX itself would choose. So these processes
can meet at the hub before JAX connects them. `JAX_COORDINATOR_PORT` sets another port.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

PORT_VARIABLE = "JAX_COORDINATOR_PORT"
# Two jobs on one host seldom have the same port, which is one of these last ports.
NUM_PORTS = 2**12
FIRST_PORT = 2**16 - NUM_PORTS
TPU_PORT = 8482
TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


class Place(NamedTuple):
    """A process's place in a run, not checked yet.

    Attributes:
      manager: The name that JAX has for the cluster.
      names: The variables that give the coordinator, the number of processes, and this process's.
      values: `host:port` of the coordinator, the number of processes, and this process's number.
    """

    manager: str
    names: tuple[str, str, str]
    values: tuple[str, str, str]


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Returns this process's place; `None` if the environment does not give all of it."""
    for find in (_open_mpi, _slurm, _tpus):
        if place := find(environment):
            return place
    return None


def _open_mpi(environment: Mapping[str, str]) -> Place | None:
    """Reads, for example, `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911` or `...;tcp6://[...]`."""
    names = ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if not environment.keys() >= {*names, "OMPI_COMM_WORLD_LOCAL_RANK"}:
        return None
    uri, count, process = (environment[name] for name in names)
    found = re.match(r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri)
    if found is None:
        return None
    # The number of a job is a multiple of 2^12.
    address = _address(environment, found[2] or f"[{found[3]}]", int(found[1]) // 2**12)
    return Place("ompi", names, (address, count, process))


def _slurm(environment: Mapping[str, str]) -> Place | None:
    names = ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")
    job = environment.get("SLURM_JOB_ID", "")
    if not (environment.keys() >= {*names, "SLURM_LOCALID"} and job.isdecimal()):
        return None
    nodes, count, process = (environment[name] for name in names)
    return Place(
        "slurm", names, (_address(environment, first_node(nodes), int(job)), count, process)
    )


def first_node(nodes: str) -> str:
    """Returns the first host of a list of Slurm, such as `node[007-015,020],login1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def _tpus(environment: Mapping[str, str]) -> Place | None:
    """Reads the variables of TPUs on GKE; a run may have several slices (`MEGASCALE_*`)."""
    hosts_name = next((name for name in TPU_HOSTS if environment.get(name)), "")
    worker = environment.get("TPU_WORKER_ID", "")
    slices = environment.get("MEGASCALE_NUM_SLICES") or "1"
    number = environment.get("MEGASCALE_SLICE_ID") or "0"
    if not (hosts_name and all(x.isdecimal() for x in (worker, slices, number))):
        return None
    hosts = environment[hosts_name].split(",")
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]
    if int(slices) > 1 and not environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
        return None
    count, process = int(slices) * len(hosts), int(number) * len(hosts) + int(worker)
    address = f"{first.split(':')[0]}:{environment.get(PORT_VARIABLE) or TPU_PORT}"
    return Place(
        "tpu",
        (f"{hosts_name}[0]", hosts_name, "TPU_WORKER_ID"),
        (address, str(count), str(process)),
    )


def _address(environment: Mapping[str, str], host: str, job: int) -> str:
    port = environment.get(PORT_VARIABLE) or FIRST_PORT + job % NUM_PORTS
    return f"{host}:{port}"
