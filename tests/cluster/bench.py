"""The hosts and files of one scenario of `tests/cluster/run`, and what was seen in it."""

import dataclasses
import sys

from tests.cluster.hosts import Job, Output

# The port of the coordinator in runs without Slurm.
PORT = 1234
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
LONG, SHORT = "--training.num_steps=1000000", "--training.num_steps=4"
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


def ends(jobs, *codes):
    """Waits for the end of processes, checks their exit codes, and returns them as a text."""
    seen = [job.code() for job in jobs]
    assert seen == list(codes), f"codes {seen}"
    return ", ".join(map(str, seen))
