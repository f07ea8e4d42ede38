"""Runs of two hosts with the faults of real clusters; `tests/cluster/run` calls this module.

A scenario is a function that starts a small run, causes a fault, and returns when the fault was
named, by which sentence, and the exit codes. It raises an AssertionError if a code is wrong or if
the sentence does not come. `main` also checks how long the sentence took, and that no process
printed a traceback or lines of a C++ library.
"""

import dataclasses
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster.hosts import Output, Slurm, call, make_hosts
from tests.compiling import ENVIRONMENT

# Most faults must be named in this time.
BOUND = 15.0
# From the start of a process until its imports are done, on a busy machine.
BEGIN_SECONDS = 10.0
PORT = 1234
RAW = re.compile(
    r"Traceback|^(\[\d\] |\d: )?[EFWI]\d{4} |external/|\*\*\* |@ +0x|terminate called|Gloo.*"
    r"(fail|clos|reset|error|time)",
    re.MULTILINE,
)
PYTHON = sys.executable
TRAIN = (PYTHON, "-m", "manualpar", "train", "fsdp")
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
    "--checkpoint.every_steps=200",
)
LONG, SHORT = "--training.num_steps=1000000", "--training.num_steps=40"
TRAINS = r"step +\d+/"


@dataclasses.dataclass
class Seen:
    """What was seen of a fault: the seconds until it was named, the sentence, and the codes."""

    seconds: float
    sentence: str
    codes: str


class Bench:
    """The hosts, and the processes and files of one scenario."""

    def __init__(self, folder, hosts, environment):
        self.folder, self.hosts, self.environment = folder, hosts, environment
        self.n1, self.n2 = hosts.values()
        self.workdir = folder / "run"
        self.outputs = []
        folder.mkdir()

    def start(self, name, host, command, **environment):
        """Starts a process on a host, or on head if it is `None`."""
        from tests.cluster.hosts import Job

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

    def submit(self, name, *flags, restarts=1):
        """Submits the script of the template; returns the job's number and its output."""
        launch = (PYTHON, "-m", "manualpar", "launch", "--template=slurm", f"--name={name}")
        own = ("--nodes=2", f"--workdir={self.workdir}", f"--restarts={restarts}", "--")
        script = self.start(f"{name}.sbatch", None, [*launch, *own, *TRAIN, *SMALL, LONG])
        assert script.code() == 0, script.text
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
    began = time.monotonic()
    job = bench.srun(*TRAIN, *SMALL, SHORT, f"--workdir={bench.workdir}")
    seconds, sentence = job.wait_for(r"mesh: ", since=began)
    assert job.code() == 0
    assert "4 devices" in job.text or "2 processes" in job.text, job.text
    return Seen(seconds, sentence, "0")


def doctor_finds_two_hosts_ready(bench):
    began = time.monotonic()
    workdir = f"--workdir={bench.workdir}"
    job = bench.srun(PYTHON, "-m", "manualpar", "doctor", "--cluster", workdir)
    assert job.code() == 0
    seconds, sentence = job.wait_for(r"n2: ok", since=began)
    assert job.find(r"n1: ok")
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
    number, output = bench.submit("limited", "--time=1", "--signal=B:USR1@50")
    output.wait_for(TRAINS)
    began = time.monotonic()
    _, sentence = output.wait_for("stopped after step .* is saved")
    output.wait_for(f"job {number}: srun ended with 75 after 0 restarts")
    seconds, _ = output.wait_for("going on from the checkpoint of step", since=began)
    time.sleep(2.0)
    call("scancel", "--signal=USR1", number)
    output.wait_for(f"job {number}: srun ended with 75 after 1 restarts")
    output.wait_for("not requeued, because it has been restarted 1 times")
    return Seen(seconds, sentence, "75")


def a_task_that_never_comes(bench):
    late = 'if [ "$SLURM_PROCID" = 1 ]; then sleep 40; exit 0; fi; exec "$@"'
    flags = (*SMALL, LONG, "--wait=8", f"--workdir={bench.workdir}")
    began = time.monotonic()
    job = bench.srun("bash", "-c", late, "bash", *TRAIN, *flags)
    seconds, sentence = job.wait_for("process 1 .*not connected|not connected.*1", since=began)
    job.wait_for("error: .*did not")
    code = job.code()
    assert code == 4, code
    return Seen(seconds, sentence, "4")


def a_second_job_in_the_workdir(bench):
    flags = (*TRAIN, *SMALL, LONG, f"--workdir={bench.workdir}")
    first = bench.srun(*flags)
    first.wait_for(TRAINS)
    began = time.monotonic()
    second = bench.srun(*flags, name="second")
    seconds, sentence = second.wait_for("error: ", since=began)
    code = second.code()
    assert first.popen.poll() is None, "the first run has ended"
    return Seen(seconds, sentence, str(code))


def a_host_cut_off(bench):
    number, output = bench.submit("cut", restarts=1)
    output.wait_for(TRAINS)
    began = time.monotonic()
    bench.n2.plug("down")
    seconds, sentence = output.wait_for("process 1 on n2 .* was lost", since=began)
    output.wait_for(f"job {number}: ", seconds=120)
    return Seen(seconds, sentence, "4")


def firewall(bench):
    rule = ("--protocol=tcp", "--source", bench.n1.address, "--syn", "--jump=DROP")
    bench.n2.call("iptables", "--append=INPUT", *rule)
    began = time.monotonic()
    job = bench.srun(*TRAIN, *SMALL, SHORT, f"--workdir={bench.workdir}")
    seconds, sentence = job.wait_for("n1 cannot reach n2 at 10.77.0.2:", since=began)
    assert job.code() == 2
    return Seen(seconds, sentence, "2")


def unshared_workdir(bench):
    bench.workdir.mkdir()
    bench.n2.call("mount", "-t", "tmpfs", "tmpfs", str(bench.workdir))
    try:
        began = time.monotonic()
        job = bench.srun(*TRAIN, *SMALL, SHORT, f"--workdir={bench.workdir}")
        seconds, sentence = job.wait_for("does not see in", since=began)
        assert job.code() == 2
    finally:
        bench.n2.call("umount", str(bench.workdir))
    return Seen(seconds, sentence, "2")


def debians_hosts_file(bench):
    bench.n2.hosts.write_text(f"127.0.1.1 n2\n{bench.n2.hosts.read_text()}")
    began = time.monotonic()
    job = bench.srun(*TRAIN, *SMALL, SHORT, f"--workdir={bench.workdir}")
    seconds, sentence = job.wait_for("resolves its own name to 127.0.1.1", since=began)
    assert job.code() == 2
    return Seen(seconds, sentence, "2")


UNDER_SLURM = (
    found_without_a_flag,
    doctor_finds_two_hosts_ready,
    scancel,
    time_limit_with_requeue,
    a_task_that_never_comes,
    a_second_job_in_the_workdir,
    a_host_cut_off,
    firewall,
    unshared_workdir,
    debians_hosts_file,
)


def main(names):
    folder = Path(tempfile.mkdtemp())
    hosts = make_hosts(folder)
    slurm = Slurm(folder / "slurm", hosts)
    environment = {
        **ENVIRONMENT,
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
    }
    passed = failed = 0
    print("| scenario | named after | code | sentence |\n|---|---|---|---|", flush=True)
    for scenario in UNDER_SLURM:
        title = scenario.__name__.replace("_", " ")
        if names and not any(name in scenario.__name__ for name in names):
            continue
        bench = Bench(folder / scenario.__name__, hosts, environment)
        try:
            seen = scenario(bench)
            for output in bench.outputs:
                raw = RAW.search(output.text)
                assert raw is None, f"{output.path.name} has {raw[0]!r}"
            print(f"| {title} | {seen.seconds:.1f} s | {seen.codes} | `{seen.sentence}` |", flush=True)
            passed += 1
        except AssertionError as error:
            failed += 1
            print(f"| {title} | failed | | {error} |", flush=True)
            for output in bench.outputs:
                print(f"--- {output.path.name}\n{output.text[-3000:]}", flush=True)
        finally:
            bench.clear()
            slurm.make_idle()
    print(f"{passed} passed, {failed} failed", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
