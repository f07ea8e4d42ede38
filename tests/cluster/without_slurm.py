"""Scenarios of two hosts whose processes get their numbers from variables, and of one machine."""

import os
import shutil
import signal
import time
from pathlib import Path

from tests.cluster.bench import LONG, PORT, PYTHON, SHORT, SMALL, TRAIN, TRAINS, Seen, ends
from tests.paths import ROOT


def in_a_run(bench, fault, sentence, *codes, who=0, flags=(), **named):
    """Causes a fault in a run that trains, and waits for a sentence of process `who`."""
    jobs = bench.pair(LONG, *flags)
    jobs[0].wait_for(TRAINS)
    fault()
    began = time.monotonic()
    seconds, line = jobs[who].wait_for(sentence, since=began, **named)
    return Seen(seconds, line, ends(jobs, *codes))


def at_the_start(bench, sentence, *codes, who=0, flags=(SHORT,), **own):
    """Starts a run whose hosts have a fault, and waits for a sentence of process `who`."""
    jobs = bench.pair(*flags, **own)
    began = max(job.wait_for_imports(1) for job in jobs)
    seconds, line = jobs[who].wait_for(sentence, since=began)
    return Seen(seconds, line, ends(jobs, *codes))


def only_the_port_of_the_coordinator(bench):
    """Drops all connections to other ports, and what belongs to older ones."""
    for port in ("--sport", "--dport"):
        bench.n2.filter("--protocol", "tcp", port, str(PORT), "--jump", "ACCEPT")
    bench.n2.drop("--in-interface", "eth0")


def two_hosts_by_the_lines_of_the_page(bench):
    page = (ROOT / "docs" / "clusters.md").read_text()
    section = page.partition("\n## Two hosts\n")[2].partition("\n## ")[0]
    lines = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    assert lines.count("/shared/") == 2, lines
    lines = lines.replace("/shared/", f"{bench.folder}/shared/")
    path = f"{Path(PYTHON).parent}:{os.environ['PATH']}"
    began = time.monotonic()
    jobs = []
    for number, host in enumerate((bench.n1, bench.n2)):
        own = lines.replace("PROCESS_ID=0", f"PROCESS_ID={number}")
        jobs.append(bench.start(host.name, host, ["bash", "-ec", own], PATH=path))
    for name in ("n1", "n2"):
        jobs[0].wait_for(f"{name}: ok")
    seconds, _ = jobs[0].wait_for(TRAINS, since=began)
    return Seen(seconds, jobs[0].find("mesh: .*2 hosts"), "none")


def a_link_down_for_5_seconds(bench):
    jobs = bench.pair(LONG)
    jobs[0].wait_for(TRAINS)
    bench.n2.plug("down")
    time.sleep(5.0)
    bench.n2.plug("up")
    began, last = time.monotonic(), len(jobs[0].text)
    while len(jobs[0].text) < last + 200:
        assert time.monotonic() < began + 30, "the run does not go on"
        time.sleep(0.05)
    seconds = time.monotonic() - began
    assert not any(job.has_ended for job in jobs)
    return Seen(seconds, jobs[0].text.splitlines()[-1], "none")


def a_link_down(bench):
    return in_a_run(bench, lambda: bench.n2.plug("down"), "process 1 on n2 .* was lost", 4, 4)


def a_link_down_while_saving(bench):
    def fault():
        saves = bench.workdir / "checkpoints"
        seen = set(saves.rglob("*"))
        until = time.monotonic() + 30
        while time.monotonic() < until and not set(saves.rglob("*")) - seen:
            time.sleep(0.002)
        bench.n2.plug("down")

    return in_a_run(bench, fault, "process 1 on n2 .* was lost", 4, 4)


def a_link_down_at_the_start(bench):
    bench.n2.plug("down")
    flags = (SHORT, "--wait=8")
    return at_the_start(bench, "process 0 does not answer", 4, 4, who=1, flags=flags)


def a_firewall_before_the_coordinator(bench):
    bench.n1.drop("--protocol", "tcp", "--dport", str(PORT))
    flags = (SHORT, "--wait=8")
    return at_the_start(bench, "process 0 does not answer", 4, 4, who=1, flags=flags)


def a_firewall_after_the_coordinator(bench):
    only_the_port_of_the_coordinator(bench)
    return at_the_start(bench, "n1 cannot reach n2 at", 2, 2)


def a_firewall_during_the_run(bench):
    def fault():
        only_the_port_of_the_coordinator(bench)

    sentence = "process . on .* was lost|stand still"
    return in_a_run(bench, fault, sentence, 4, 4, seconds=120)


def the_coordinators_port_closed_during_the_run(bench):
    def fault():
        for port in ("--sport", "--dport"):
            bench.n2.drop("--protocol", "tcp", port, str(PORT))

    return in_a_run(bench, fault, "was lost", 4, 4)


def a_name_that_nobody_knows(bench):
    address, flags = f"nosuchhost:{PORT}", (SHORT, "--wait=8")
    return at_the_start(bench, "nosuchhost", 4, 4, who=1, flags=flags, address=address)


def a_clock_an_hour_ahead(bench):
    ahead = bench.folder / "ahead"
    ahead.mkdir()
    code = "import time\nnow = time.time\ntime.time = lambda: now() + 3600.0\n"
    (ahead / "sitecustomize.py").write_text(code)
    path = {"PYTHONPATH": f"{ahead}:{ROOT}"}
    return at_the_start(bench, "has a clock", 0, 0, own=({}, path))


def another_commit_of_one_version(bench):
    other = bench.folder / "other"
    for part in ("manualpar", "configs"):
        shutil.copytree(ROOT / part, other / part)
    with (other / "manualpar" / "launch.py").open("a") as file:
        file.write("# Another commit.\n")
    path = {"PYTHONPATH": f"{other}:{ROOT}"}
    return at_the_start(bench, "the hash of manualpar's sources is", 2, 2, own=({}, path))


def another_folder_under_the_name_of_the_workdir(bench):
    bench.workdir.mkdir()
    bench.n2.call("mount", "-t", "tmpfs", "tmpfs", str(bench.workdir))
    try:
        return at_the_start(bench, "does not see in", 2, 2)
    finally:
        bench.n2.call("umount", str(bench.workdir))


def a_host_that_cannot_write_large_files(bench):
    limit = ("bash", "-c", 'ulimit -f 2; exec "$@"', "bash")
    jobs = bench.pair(LONG, "--checkpoint.every_steps=20", prefix=((), limit))
    jobs[0].wait_for("compiled the training step")
    began = time.monotonic()
    seconds, line = jobs[1].wait_for("error: ", since=began)
    return Seen(seconds, line, ends(jobs, 4, 6))


def a_name_at_127_0_1_1(bench):
    bench.n1.hosts.write_text(f"127.0.1.1 n1\n{bench.n1.hosts.read_text()}")
    sentence = "n1 resolves its own name to 127.0.1.1"
    return at_the_start(bench, sentence, 2, 2, address=f"{bench.n1.address}:{PORT}")


def launch(bench, *flags, name="launch"):
    """Starts two processes on n1 with the launcher."""
    own = (PYTHON, "-m", "manualpar", "launch", "--processes=2", "--devices-per-process=2")
    command = [*own, "--", *TRAIN, *SMALL, *flags, f"--workdir={bench.workdir}"]
    return bench.start(name, bench.n1, command)


def child(job, number):
    """Returns the PID of a process that a launcher has started."""
    pids = Path(f"/proc/{job.popen.pid}/task/{job.popen.pid}/children").read_text().split()
    return int(pids[number])


def signalled(bench, number, who, sentence, code):
    job = launch(bench, LONG)
    job.wait_for(TRAINS)
    began = time.monotonic()
    os.kill(job.popen.pid if who is None else child(job, who), number)
    seconds, line = job.wait_for(sentence, since=began)
    return Seen(seconds, line, ends([job], code))


def launched_and_one_process_killed(bench):
    return signalled(bench, signal.SIGKILL, 1, "process 1 was ended by SIGKILL", 137)


def launched_and_process_0_killed(bench):
    return signalled(bench, signal.SIGKILL, 0, "process 0 was ended by SIGKILL", 137)


def launched_and_one_process_stopped(bench):
    return signalled(bench, signal.SIGSTOP, 1, "process 1 on n1 .* was lost", 4)


def launched_and_sigterm(bench):
    return signalled(bench, signal.SIGTERM, None, "stopped after step .* is saved", 75)


def one_process_and_sigusr1(bench):
    job = bench.start("one", bench.n1, [*TRAIN, *SMALL, LONG, f"--workdir={bench.workdir}"])
    job.wait_for(TRAINS)
    began = time.monotonic()
    os.kill(job.popen.pid, signal.SIGUSR1)
    seconds, line = job.wait_for("stopped after step .* is saved", since=began)
    return Seen(seconds, line, ends([job], 75))


def one_process_and_a_full_disk(bench):
    bench.workdir.mkdir()
    bench.n1.call("mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(bench.workdir))
    try:
        job = bench.start("one", bench.n1, [*TRAIN, *SMALL, LONG, f"--workdir={bench.workdir}"])
        job.wait_for("compiled the training step")
        began = time.monotonic()
        seconds, line = job.wait_for("error: ", since=began)
        return Seen(seconds, line, ends([job], 6))
    finally:
        bench.n1.call("umount", "--lazy", str(bench.workdir))


TWO_HOSTS = (
    two_hosts_by_the_lines_of_the_page,
    a_link_down_for_5_seconds,
    a_link_down,
    a_link_down_while_saving,
    a_link_down_at_the_start,
    a_firewall_before_the_coordinator,
    a_firewall_after_the_coordinator,
    a_firewall_during_the_run,
    the_coordinators_port_closed_during_the_run,
    a_name_that_nobody_knows,
    a_name_at_127_0_1_1,
    a_clock_an_hour_ahead,
    another_commit_of_one_version,
    another_folder_under_the_name_of_the_workdir,
    a_host_that_cannot_write_large_files,
)
ONE_MACHINE = (
    launched_and_one_process_killed,
    launched_and_process_0_killed,
    launched_and_one_process_stopped,
    launched_and_sigterm,
    one_process_and_sigusr1,
    one_process_and_a_full_disk,
)
