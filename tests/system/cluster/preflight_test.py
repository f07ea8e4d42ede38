"""The checks of hosts before a run: processes are threads here, and hosts addresses of loopback."""

import concurrent.futures
import dataclasses
import os
import re
import resource
import socket
import sys

import pytest

from manualpar.system.cluster import preflight, this_host
from manualpar.system.cluster.cluster import Cluster
from manualpar.system.cluster.hub import Hub
from manualpar.system.cluster.messages import Terms
from manualpar.system.cluster.preflight import _judge, check_hosts, describe_refusal, peers
from manualpar.system.cluster.startup import listen
from manualpar.system.cluster.this_host import Host, find_host, limits, name_findings
from tests.system.cluster.processes import free_port, lines_of_ours

HANG_SECONDS = 60
WELL = {"findings": [], "name": [], "unreachable": [], "clock": 0.0, "facts": {}, "driver": ""}


class LoopbackHost(Host):
    """A host that counts as reachable, although its address is one of loopback."""

    is_loopback = False


def host(number):
    return LoopbackHost(f"n{number}", f"127.0.0.{number + 1}")


def check_together(count, **options):
    """Checks `count` hosts; an option is a function of the number of the process."""
    listener = listen("127.0.0.1:0")
    terms = Terms(0, count, "secret", 30.0, HANG_SECONDS)
    port, hub = listener.getsockname()[1], Hub(listener, terms)

    def check(process):
        cluster = Cluster(process_id=process, num_processes=count, timeout_seconds=30.0)
        cluster.connect(
            ["127.0.0.1"],
            port,
            dataclasses.replace(terms, process=process),
            hub if not process else None,
        )
        own = {name: value(process) for name, value in options.items()}
        verdict = check_hosts(cluster, **{"host": host(process), **own})
        cluster.close()
        return verdict

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        verdicts = list(pool.map(check, range(count), timeout=HANG_SECONDS))
    assert all(verdict.fatal == verdicts[0].fatal for verdict in verdicts)
    assert not any(verdict.lines for verdict in verdicts[1:])
    return verdicts[0]


def test_a_line_for_each_host_and_nothing_is_left_in_the_folder(tmp_path):
    verdict = check_together(5, workdir=lambda _: tmp_path / "new" / "run")
    assert verdict.lines == ["n0: ok", "n1: ok", "n2: ok", "n3: ok", "n4: ok"]
    assert verdict.fatal == []
    assert list(tmp_path.iterdir()) == []


def test_a_firewall_is_named_by_both_of_its_hosts(monkeypatch):
    """Nobody listens at the address that n1 has announced."""

    def listen_at(address):
        return this_host.listen_at("127.0.0.99" if address == "127.0.0.2" else address)

    monkeypatch.setattr(preflight, "listen_at", listen_at)
    lines = check_together(3).lines
    assert lines[1] == "n1: ok"
    for name, line in (("n0", lines[0]), ("n2", lines[2])):
        assert line.startswith(f"{name}: cannot reach n1 at 127.0.0.2:")
        assert line.endswith("let the hosts of a run connect to each other on all ports")


def test_another_program_at_the_address_is_noticed():
    with preflight._greeting("127.0.0.1", 7) as port:
        assert preflight._try_one(3, ("127.0.0.1", port)) == "another program answers there"
        assert abs(preflight._try_one(7, ("127.0.0.1", port))) < 1.0


def test_a_folder_that_is_not_shared_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "SHARED_FILE_SECONDS", 0.3)
    folder = tmp_path / "run"
    for process in range(3):
        (tmp_path / str(process)).mkdir()
    verdict = check_together(3, workdir=lambda process: tmp_path / str(process // 2))
    sees = "does not see in"
    assert f"n2 {sees} {tmp_path / '1'} the file that n0 wrote there" in describe_refusal(verdict)
    assert f"n0 {sees} {tmp_path / '0'} the file that n2 wrote there" in describe_refusal(verdict)
    assert verdict.lines[1] == "n1: ok"
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_to_and_differing_facts_are_both_named(tmp_path):
    (tmp_path / "file").touch()
    verdict = check_together(
        2,
        workdir=lambda process: tmp_path / "file" / "run" if process else tmp_path,
        facts=lambda process: {"jax": f"0.{process}"},
    )
    assert verdict.lines[1].startswith(f"n1: cannot write to the workdir {tmp_path / 'file'}")
    assert verdict.fatal[-1] == "jax is 0.0 in process 0 and 0.1 in process 1"


def test_a_host_with_debians_name_is_still_reached_at_the_address_of_the_hub():
    verdict = check_together(2, host=lambda process: Host(f"n{process}", "127.0.1.1"))
    assert [line.split(";")[0] for line in verdict.lines] == [
        f"{name}: resolves its own name to 127.0.1.1, where no other host reaches it"
        for name in ("n0", "n1")
    ]
    assert len(verdict.fatal) == 2
    alone = check_together(2, host=lambda _: Host("n0", "127.0.1.1"))
    assert alone == (["n0: ok"], [])


@pytest.mark.parametrize(
    ("report", "line"),
    [
        ({}, "n1: ok"),
        ({"clock": 71.0}, "n1: has a clock 71 s ahead of process 0's; synchronize it (NTP)"),
        ({"clock": -8.6}, "n1: has a clock 9 s behind process 0's; synchronize it (NTP)"),
        ({"clock": None}, "n1: ok"),
        ({"memory": 2**34}, "the memory of a device is 16.0 GiB in n1 and 32.0 GiB in n0"),
        ({"driver": "550.1"}, "NVIDIA's driver is absent in n0 and 550.1 in n1"),
    ],
)
def test_what_is_unusual_is_said_and_not_refused(report, line):
    own = {**WELL, "host": "n0", "memory": 2**35}
    verdict = _judge({0: own, 1: {**own, "host": "n1", **report}})
    assert line in verdict.lines
    assert not verdict.fatal


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 1000])
def test_connections_go_both_ways_and_grow_as_n_log_n(count):
    tried = {(process, other) for process in range(count) for other in peers(process, count)}
    assert len(tried) <= count * (2 * count.bit_length() + 1)
    assert all((other, process) in tried for process, other in tried if 0 not in (process, other))
    if count <= 5:
        assert len(tried) == count * (count - 1)


@pytest.mark.parametrize(
    ("addresses", "found", "finding"),
    [
        (["127.0.1.1"], Host("n", "127.0.1.1"), "resolves its own name to 127.0.1.1"),
        (["192.0.2.7"], Host("n", "192.0.2.7", False), "does not have the address 192.0.2.7"),
        ([], Host("n", "", False), "does not know its own name n"),
        (["192.0.2.7", "127.0.0.5"], Host("n", "127.0.0.5"), "resolves its own name to 127.0.0.5"),
    ],
)
def test_the_name_of_a_host(monkeypatch, addresses, found, finding):
    def resolve(name, *args, **kwargs):
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in addresses]

    monkeypatch.setattr(this_host.socket, "gethostname", lambda: "n")
    monkeypatch.setattr(this_host.socket, "getaddrinfo", resolve)
    assert find_host() == found
    [[text, _]] = name_findings(found)
    assert finding in text


def test_too_few_open_files_are_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    [[text, is_fatal]] = limits(64)
    assert text == (
        "may open 256 files, expected at least 384 for 64 processes; set ulimit -n 65536"
    )
    assert is_fatal


def launched(processes, script, *command, count=2):
    """Launches processes; a shell runs `script` in each before it becomes the command."""
    return processes.start(
        [
            *(sys.executable, "-m", "manualpar", "launch", f"--processes={count}"),
            *("--devices-per-process=1", "--", "sh", "-c", f'{script}; exec "$@"', "sh"),
            *(sys.executable, "-m", "manualpar", *command),
        ]
    )


@pytest.mark.slow
def test_the_doctor_goes_on_to_the_end_and_has_a_code_of_its_own(processes, tmp_path):
    """Process 1 has few open files and sees another folder: a relative one, from elsewhere."""
    (tmp_path / "1").mkdir()
    script = f"if [ $MANUALPAR_PROCESS_ID = 1 ]; then ulimit -n 200; cd {tmp_path / '1'}; fi"
    process = launched(processes, script, "doctor", "--cluster", "--workdir=run")
    assert process.wait() == 7, process.err
    assert "may open 200 files, expected at least 260" in process.out
    assert "does not see in run the file that" in process.out
    assert "[0] a run of 2 processes would be refused" in process.out


@pytest.mark.slow
def test_a_run_whose_folder_is_not_shared_is_refused_before_it_compiles(processes, tmp_path):
    (tmp_path / "1").mkdir()
    script = f"if [ $MANUALPAR_PROCESS_ID = 1 ]; then cd {tmp_path / '1'}; fi"
    process = launched(processes, script, "train", "fsdp", f"--workdir={tmp_path.name}/run")
    assert process.wait() == 2, process.err
    *said, last = [line for line in lines_of_ours(process.err) if "Gloo" not in line]
    assert all("error: the hosts are not ready for this run: " in line for line in said), said
    assert len(said) == 2
    assert re.fullmatch(r"process(es)? [01, ]+ ended with exit code 2", last)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["localhost", "no-such-host"])
def test_a_task_of_slurm_that_stays_alone_ends_with_one_sentence(processes, nodes):
    """Process 0 never comes, or the name of its host does not resolve."""
    variables = {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "PYTHONPATH": os.getcwd(),
    }
    command = [sys.executable, "-m", "manualpar", "train", "fsdp", "--wait=6"]
    process = processes.start(command, **variables)
    assert process.wait() == 4, process.err
    early, late = process.err.splitlines()
    assert early.startswith("process 0 does not answer after 5 s, at port")
    assert late.startswith("error: initialize: process 0 cannot be reached on its port")
    assert "within 6 s" in late
