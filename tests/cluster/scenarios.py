"""Runs of two hosts with the faults of real clusters; `tests/cluster/run` calls this module.

A scenario is a function that starts a small run, causes a fault, and returns when the fault was
named, by which sentence, and the exit codes. It raises an AssertionError if a code is wrong or if
the sentence does not come. `main` also checks how long the sentence took, and that no process
printed a traceback or lines of a C++ library.
"""

import dataclasses
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster.hosts import Job, Output, Slurm, call, make_hosts
from tests.compiling import ENVIRONMENT
from tests.paths import ROOT

# Most faults must be named in this time.
BOUND = 15.0
PORT = 1234
RAW = re.compile(
    r"Traceback|^(\[\d\] |\d: )?[EFWI]\d{4} |external/|\*\*\* (?!STEP|JOB)|@ +0x|"
    r"terminate called|Gloo.*(fail|clos|reset|error|time)",
    re.MULTILINE,
)
PYTHON = sys.executable
MANUALPAR = (PYTHON, "-m", "tests.cluster.command")
TRAIN = (*MANUALPAR, "train", "fsdp")
SMALL = (
    "--model.hidden_size=16",
    "--model.num_layers=1",
    "--model.dtype=float32",
    "--data.source=synthetic",
    "--data.batch_size=32",
    "--optimizer.num_minibatches=1",
    "--optimizer.warmup_steps=0",
    "--training.log_every_steps=20",
    "--training.eval_every_steps=1000000",
    "--checkpoint.every_steps=50",
)
LONG, SHORT = "--training.num_steps=1000000", "--training.num_steps=40"
TRAINS, SAVED = r"step +[1-9]\d*/", r"step +\d{3,}/"


@dataclasses.dataclass
class Seen:
    """What was seen of a fault: the seconds until it was named, the sentence, and the codes."""

    seconds: float
    sentence: str
    codes: str


class Bench:
    """The hosts, and the processes and files of one scenario."""

    def __init__(self, folder, hosts, environment, slurm=None):
        self.folder, self.hosts, self.environment = folder, hosts, environment
        self.slurm = slurm
        self.n1, self.n2 = hosts.values()
        self.workdir = folder / "run"
        self.outputs = []
        folder.mkdir()

    def start(self, name, host, command, **environment):
        """Starts a process on a host, or on head if it is `None`."""
        path, variables = self.folder / f"{name}.out", {**self.environment, **environment}
        if host is None:
            job = Job(command, path, variables)
        else:
            job = host.start(command, path, **variables)
        self.outputs.append(job)
        return job

    def srun(self, *command, name="srun"):
        """Starts a command on both hosts, as two tasks of a step."""
        slurm = ("srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=0", "--label")
        return self.start(name, None, [*slurm, *command])

    def submit(self, name, *flags, restarts=1, wait=120):
        """Submits the script of the template; returns the job's number and its output.

        `wait` replaces the seconds that srun waits for tasks after the first one has ended.
        """
        launch = (PYTHON, "-m", "manualpar", "launch", "--template=slurm", f"--name={name}")
        own = ("--nodes=2", f"--workdir={self.workdir}", f"--restarts={restarts}", "--")
        script = self.start(f"{name}.sbatch", None, [*launch, *own, *TRAIN, *SMALL, LONG])
        assert script.code() == 0, script.text
        script.path.write_text(script.text.replace("--wait=120", f"--wait={wait}"))
        sbatch = self.start("sbatch", None, ["sbatch", "--parsable", *flags, str(script.path)])
        assert sbatch.code() == 0, sbatch.text
        self.outputs.append(Output(self.folder / f"{name}-{sbatch.text.strip()}.out"))
        return sbatch.text.strip(), self.outputs[-1]

    def pair(self, *flags, address=None, own=({}, {}), prefix=((), ())):
        """Starts a run of two processes on the two hosts, without Slurm."""
        return [
            self.start(
                host.name,
                host,
                [*prefix[number], *TRAIN, *SMALL, *flags, f"--workdir={self.workdir}"],
                MANUALPAR_COORDINATOR_ADDRESS=address or f"{self.n1.address}:{PORT}",
                MANUALPAR_NUM_PROCESSES="2",
                MANUALPAR_PROCESS_ID=str(number),
                MANUALPAR_TOKEN="the token of this run",
                **own[number],
            )
            for number, host in enumerate((self.n1, self.n2))
        ]

    def clear(self):
        """Ends all processes, and mends the hosts."""
        for output in self.outputs:
            if hasattr(output, "kill"):
                output.kill()
        for host in self.hosts.values():
            host.mend()


# --- under Slurm


def found_without_a_flag(bench):
    job = bench.srun(*TRAIN, *SMALL, SHORT, f"--workdir={bench.workdir}")
    began = job.wait_for_imports()
    seconds, sentence = job.wait_for(r"mesh: ", since=began)
    assert job.code() == 0
    assert "4 devices" in job.text or "2 processes" in job.text, job.text
    return Seen(seconds, sentence, "0")


def doctor_finds_two_hosts_ready(bench):
    workdir = f"--workdir={bench.workdir}"
    job = bench.srun(*MANUALPAR, "doctor", "--cluster", workdir)
    began = job.wait_for_imports()
    seconds, sentence = job.wait_for(r"n2: ok", since=began)
    assert job.find(r"n1: ok")
    assert job.code() == 0
    return Seen(seconds, sentence, "0")


def scancel(bench):
    number, output = bench.submit("cancelled")
    output.wait_for(TRAINS)
    began = time.monotonic()
    call("scancel", number)
    seconds, sentence = output.wait_for("stopped after step .* is saved", since=began)
    output.wait_for(f"job {number}: srun ended with 75 after 0 restarts")
    output.wait_for(f"job {number}: not requeued, because it is ")
    return Seen(seconds, sentence, "75")


def time_limit_with_requeue(bench):
    number, output = bench.submit("limited", "--time=2", "--signal=B:USR1@60")
    output.wait_for(TRAINS)
    output.wait_for("SIGUSR1: stopping after this step")
    began = time.monotonic()
    seconds, sentence = output.wait_for("stopped after step .* is saved", since=began)
    output.wait_for(f"job {number}: srun ended with 75 after 0 restarts")
    output.wait_for("going on from the checkpoint of step")
    time.sleep(2.0)
    call("scancel", "--signal=USR1", number)
    output.wait_for(f"job {number}: srun ended with 75 after 1 restarts")
    output.wait_for("not requeued, because it has been restarted 1 times")
    return Seen(seconds, sentence, "75")


def a_task_that_never_comes(bench):
    late = 'if [ "$SLURM_PROCID" = 1 ]; then sleep 40; exit 0; fi; exec "$@"'
    flags = (*SMALL, LONG, "--wait=8", f"--workdir={bench.workdir}")
    job = bench.srun("bash", "-c", late, "bash", *TRAIN, *flags)
    began = job.wait_for_imports(1)
    seconds, sentence = job.wait_for("process 1 .*not connected|not connected.*1", since=began)
    job.wait_for("0: process 1 was lost: it has not connected to process 0 within 8 s")
    job.wait_for("task 0: Exited with exit code 4")
    return Seen(seconds, sentence, "4")


def a_second_job_in_the_workdir(bench):
    flags = (*TRAIN, *SMALL, LONG, f"--workdir={bench.workdir}")
    first = bench.srun(*flags)
    first.wait_for(TRAINS)
    second = bench.srun(*flags, name="second")
    began = second.wait_for_imports()
    seconds, sentence = second.wait_for("error: ", since=began)
    code = second.code()
    assert first.popen.poll() is None, "the first run has ended"
    return Seen(seconds, sentence, str(code))


def a_host_cut_off(bench):
    number, output = bench.submit("cut")
    output.wait_for(TRAINS)
    began = time.monotonic()
    bench.n2.plug("down")
    seconds, sentence = output.wait_for("process 1 on n2 .* was lost", since=began)
    output.wait_for("n1: task 0: Exited with exit code 4")
    # Then srun waits for Slurm, which requeues the job when it believes that the host has failed.
    output.wait_for("Node failure on n2")
    state, until = "", time.monotonic() + 60
    while state != "PENDING":
        assert time.monotonic() < until, f"the job is {state}"
        state = call("squeue", "--noheader", f"--jobs={number}", "--format=%T").strip()
        time.sleep(0.2)
    return Seen(seconds, sentence, "4")


def the_link_between_two_hosts_cut(bench):
    number, output = bench.submit("apart", wait=10)
    output.wait_for(SAVED)
    rule = ("--source", bench.n1.address, "--jump", "DROP")
    began = time.monotonic()
    bench.n2.call("iptables", "--append", "INPUT", *rule)
    seconds, sentence = output.wait_for("process 1 on n2 .* was lost", since=began)
    output.wait_for(f"job {number}: srun ended with .* after 0 restarts")
    bench.n2.mend()
    output.wait_for("going on from the checkpoint of step")
    return Seen(seconds, sentence, "4")


def firewall(bench):
    rule = ("--protocol", "tcp", "--source", bench.n1.address, "--syn", "--jump", "DROP")
    bench.n2.call("iptables", "--append", "INPUT", *rule)
    job = bench.srun(*TRAIN, *SMALL, SHORT, f"--workdir={bench.workdir}")
    began = job.wait_for_imports()
    seconds, sentence = job.wait_for("n1 cannot reach n2 at 10.77.0.2:", since=began)
    assert job.code() == 2
    return Seen(seconds, sentence, "2")


def unshared_workdir(bench):
    bench.workdir.mkdir()
    bench.n2.call("mount", "-t", "tmpfs", "tmpfs", str(bench.workdir))
    try:
        job = bench.srun(*TRAIN, *SMALL, SHORT, f"--workdir={bench.workdir}")
        began = job.wait_for_imports()
        seconds, sentence = job.wait_for("does not see in", since=began)
        assert job.code() == 2
    finally:
        bench.n2.call("umount", str(bench.workdir))
    return Seen(seconds, sentence, "2")


def debians_hosts_file(bench):
    bench.n2.hosts.write_text(f"127.0.1.1 n2\n{bench.n2.hosts.read_text()}")
    job = bench.srun(*TRAIN, *SMALL, SHORT, f"--workdir={bench.workdir}")
    began = job.wait_for_imports()
    seconds, sentence = job.wait_for("resolves its own name to 127.0.1.1", since=began)
    assert job.code() == 2
    return Seen(seconds, sentence, "2")


def a_signal_before_the_run_can_save(bench):
    number, output = bench.submit("early")
    output.wait_for("srun: launching|$", seconds=20)
    while call("squeue", "--noheader", "--steps", "--format=%i").strip()[:1] == "":
        time.sleep(0.1)
    time.sleep(1.0)
    began = time.monotonic()
    call("scancel", "--signal=USR1", number)
    seconds, sentence = output.wait_for(f"job {number}: srun ended with 138", since=began)
    output.wait_for("srun ended with 138 after 1|mesh: ")
    return Seen(seconds, sentence, "138")


# --- two hosts without Slurm


def ends(jobs, *codes, seconds=60.0):
    """Checks the exit codes of processes; a code may be a tuple of the ones that are right."""
    seen = [job.code(seconds) for job in jobs]
    for code, right in zip(seen, codes, strict=True):
        assert code in (right if isinstance(right, tuple) else (right,)), f"codes {seen}"
    return ", ".join(map(str, seen))


def in_a_run(bench, fault, sentence, *codes, who=0, flags=(), **named):
    """Causes a fault in a run that trains, and waits for a sentence of process `who`."""
    jobs = bench.pair(LONG, *flags)
    jobs[0].wait_for(TRAINS)
    began = time.monotonic()
    fault()
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
        rule = ("--protocol", "tcp", port, str(PORT), "--jump", "ACCEPT")
        bench.n2.call("iptables", "--append", "INPUT", *rule)
    bench.n2.call("iptables", "--append", "INPUT", "--in-interface", "eth0", "--jump", "DROP")


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
    return Seen(time.monotonic() - began, "(goes on)", "")


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
    rule = ("--protocol", "tcp", "--dport", str(PORT), "--jump", "DROP")
    bench.n1.call("iptables", "--append", "INPUT", *rule)
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
            rule = ("--protocol", "tcp", port, str(PORT), "--jump", "DROP")
            bench.n2.call("iptables", "--append", "INPUT", *rule)

    return in_a_run(bench, fault, "was lost", 4, 4)


def a_name_that_nobody_knows(bench):
    address, flags = f"nosuchhost:{PORT}", (SHORT, "--wait=8")
    sentence = "nosuchhost"
    return at_the_start(bench, sentence, (2, 4), 4, who=1, flags=flags, address=address)


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


# --- one machine


def launch(bench, *flags, name="launch"):
    """Starts two processes on n1 with the launcher."""
    own = (PYTHON, "-m", "manualpar", "launch", "--processes=2", "--devices-per-process=2")
    command = [*own, "--", *TRAIN, *SMALL, *flags, f"--workdir={bench.workdir}"]
    return bench.start(name, bench.n1, command)


def child(job, number):
    """Returns the PID of a process that a launcher has started."""
    pids = Path(f"/proc/{job.popen.pid}/task/{job.popen.pid}/children").read_text().split()
    return int(pids[number])


def signalled(bench, number, who, sentence, *codes):
    job = launch(bench, LONG)
    job.wait_for(TRAINS)
    began = time.monotonic()
    os.kill(job.popen.pid if who is None else child(job, who), number)
    seconds, line = job.wait_for(sentence, since=began)
    code = ends([job], codes)
    return Seen(seconds, line, code)


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
        began = job.wait_for_imports(1)
        seconds, line = job.wait_for("error: ", since=began)
        return Seen(seconds, line, ends([job], 6))
    finally:
        bench.n1.call("umount", "--lazy", str(bench.workdir))


UNDER_SLURM = (
    found_without_a_flag,
    doctor_finds_two_hosts_ready,
    scancel,
    time_limit_with_requeue,
    a_task_that_never_comes,
    a_second_job_in_the_workdir,
    a_host_cut_off,
    the_link_between_two_hosts_cut,
    firewall,
    unshared_workdir,
    debians_hosts_file,
    a_signal_before_the_run_can_save,
)
TWO_HOSTS = (
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

# The limit of a hang is 10 s and the time of the longest phase so far.
BOUNDS = {a_firewall_during_the_run: 30.0}
# XLA aborts a process that finds JAX's coordination service gone, and says so in lines of its own.
SAY_MORE = (launched_and_process_0_killed,)


def try_scenario(scenario, bench):
    """Runs a scenario, prints its row of the table, and returns whether it passed."""
    title = scenario.__name__.replace("_", " ")
    try:
        if bench.slurm:
            bench.slurm.make_idle()
        seen = scenario(bench)
        for output in bench.outputs:
            raw = RAW.search(output.text)
            assert raw is None or scenario in SAY_MORE, f"{output.path.name} has {raw[0]!r}"
        bound = BOUNDS.get(scenario, BOUND)
        assert seen.seconds < bound, f"after {seen.seconds:.1f} s, not {bound:g}: {seen.sentence}"
    except Exception as error:
        print(f"| {title} | failed | | {type(error).__name__}: {error} |", flush=True)
        for output in bench.outputs:
            print(f"--- {output.path.name}\n{output.text[-2500:]}", flush=True)
        return False
    sentence = seen.sentence.replace(str(bench.folder), "")
    print(f"| {title} | {seen.seconds:.1f} s | {seen.codes} | `{sentence}` |", flush=True)
    return True


def main(names):
    chosen = [
        scenario
        for scenario in (*UNDER_SLURM, *TWO_HOSTS, *ONE_MACHINE)
        if not names or any(name in scenario.__name__ for name in names)
    ]
    folder = Path(tempfile.mkdtemp())
    hosts = make_hosts(folder)
    environment = {
        **ENVIRONMENT,
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
    }
    slurm = Slurm(folder / "slurm", hosts) if set(chosen) & set(UNDER_SLURM) else None
    passed = 0
    print("| scenario | named after | code | sentence |\n|---|---|---|---|", flush=True)
    for scenario in chosen:
        daemons = slurm if scenario in UNDER_SLURM else None
        bench = Bench(folder / scenario.__name__, hosts, environment, daemons)
        try:
            passed += try_scenario(scenario, bench)
        finally:
            bench.clear()
    print(f"{passed} passed, {len(chosen) - passed} failed", flush=True)
    return 0 if passed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
