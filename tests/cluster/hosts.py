"""Two hosts, n1 and n2, and Slurm on them: namespaces of this machine, for `tests/cluster/run`.

The process that makes them must be in namespaces of its own. It is the third host, called head, on
which Slurm's controller runs.
"""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.paths import ROOT

HEAD = "10.77.0.254"
ADDRESSES = {"n1": "10.77.0.1", "n2": "10.77.0.2"}
HOSTS = "127.0.0.1 localhost\n" + "".join(
    f"{address} {name}\n" for name, address in {**ADDRESSES, "head": HEAD}.items()
)
START_SECONDS = 90.0
# A process that has not written a line in this time hangs. The time until a fault is named has
# bounds of its own, but a start and a step are as slow as the machine.
HANG_SECONDS = 300.0
SLURM = """
ClusterName=tests
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its credential has expired.
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,batch_sched_delay=1
ReturnToService=2
SlurmdTimeout=20
GresTypes=gpu
NodeName=n1 NodeAddr={n1} CPUs=8 Gres=gpu:8
NodeName=n2 NodeAddr={n2} CPUs=8 Gres=gpu:8
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE OverSubscribe=FORCE:8
"""


def call(*command, enter=()):
    """Runs a command to its end, and returns its output; `enter` enters a host."""
    done = subprocess.run([*enter, *command], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


class Output:
    """A file that a process, or a job of Slurm, writes its output to."""

    def __init__(self, path):
        self.path = Path(path)

    has_ended = False

    @property
    def text(self):
        return self.path.read_text(errors="replace") if self.path.exists() else ""

    def find(self, pattern):
        """Returns the first line with a regular expression."""
        found = re.search(f"^.*(?:{pattern}).*$", self.text, re.MULTILINE)
        return found[0].strip() if found else None

    def wait_for(self, pattern, seconds=HANG_SECONDS, since=None):
        """Waits for a line; returns the seconds since a moment (or this call), and the line."""
        began = time.monotonic()
        while (line := self.find(pattern)) is None:
            if self.has_ended and self.find(pattern) is None:
                raise AssertionError(f"ended without {pattern!r}")
            waited = time.monotonic() - began
            assert waited < seconds, f"no {pattern!r} in {waited:.0f} s"
            time.sleep(0.02)
        return time.monotonic() - (began if since is None else since), line

    def wait_for_imports(self, count=2):
        """Waits until this many processes have imported their modules; returns the moment."""
        self.wait_for("imported")
        while self.text.count("imported\n") < count:
            assert not self.has_ended, "ended early"
            time.sleep(0.02)
        return time.monotonic()


class Job(Output):
    """A process on a host, the leader of a group of processes."""

    def __init__(self, command, path, environment):
        super().__init__(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("wb") as out:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self.path.parent,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                start_new_session=True,
            )

    @property
    def has_ended(self):
        return self.popen.poll() is not None

    def code(self, seconds=60.0):
        """Waits for the end; returns the exit code as a shell shows it."""
        try:
            code = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"has not ended after {seconds:g} s") from None
        return code if code >= 0 else 128 - code

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


class Host:
    """A host with a name, an address and an /etc/hosts of its own."""

    def __init__(self, name, folder):
        self.name, self.address = name, ADDRESSES[name]
        self.holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", "echo made; exec sleep infinity"],
            stdout=subprocess.PIPE,
        )
        assert self.holder.stdout.readline() == b"made\n", f"{name} cannot be made"
        self.enter = ("nsenter", f"--target={self.holder.pid}", "--net", "--uts", "--mount")
        self.hosts = folder / f"hosts-{name}"
        self.hosts.write_text(HOSTS)
        link = f"to-{name}"
        peer = ("peer", "name", "eth0", "netns", str(self.holder.pid))
        call("ip", "link", "add", link, "type", "veth", *peer)
        call("ip", "link", "set", link, "master", "switch", "up")
        self.call("hostname", name)
        self.call("mount", "--bind", str(self.hosts), "/etc/hosts")
        self.call("ip", "link", "set", "lo", "up")
        self.call("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.call("ip", "link", "set", "eth0", "up")

    def call(self, *command):
        return call(*command, enter=self.enter)

    def start(self, command, path, **environment):
        return Job([*self.enter, *command], path, environment)

    def filter(self, *rule):
        """Adds a rule to the firewall for what comes in."""
        self.call("iptables", "--append", "INPUT", *rule)

    def drop(self, *rule):
        self.filter(*rule, "--jump", "DROP")

    def plug(self, state):
        """Pulls the host's network cable ("down"), or plugs it in ("up")."""
        call("ip", "link", "set", f"to-{self.name}", state)

    def mend(self):
        """Undoes every fault but a mount."""
        self.plug("up")
        self.call("iptables", "--flush")
        self.hosts.write_text(HOSTS)


def make_hosts(folder):
    """Makes the hosts; this process becomes the host `head`."""
    hosts, switch = folder / "hosts-head", folder / "nsswitch.conf"
    hosts.write_text(HOSTS)
    switch.write_text("passwd: files\ngroup: files\nhosts: files\n")
    call("mount", "--bind", str(hosts), "/etc/hosts")
    call("mount", "--bind", str(switch), "/etc/nsswitch.conf")
    socket.sethostname("head")
    call("ip", "link", "set", "lo", "up")
    call("ip", "link", "add", "switch", "type", "bridge")
    call("ip", "address", "add", f"{HEAD}/24", "dev", "switch")
    call("ip", "link", "set", "switch", "up")
    return {name: Host(name, folder) for name in ADDRESSES}


class Slurm:
    """Slurm's daemons: munged and slurmctld on head, and slurmd on each host."""

    def __init__(self, folder, hosts):
        folder.mkdir()
        (folder / "state").mkdir()
        (folder / "key").write_bytes(secrets.token_bytes(64))
        (folder / "key").chmod(0o400)
        config = SLURM.format(folder=folder, head=HEAD, **ADDRESSES)
        (folder / "slurm.conf").write_text(config)
        # Files that stand for the GPUs which the template asks for.
        for number in range(8):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        here = {"key-file": "key", "socket": "munge", "pid-file": "munged.pid"}
        here |= {"seed-file": "seed", "log-file": "munged.log"}
        flags = [f"--{name}={folder / file}" for name, file in here.items()]
        self.daemons = [
            Job(["munged", "--foreground", "--force", *flags], folder / "munged.out", {}),
            Job(["slurmctld", "-D"], folder / "slurmctld.out", {}),
        ]
        for name, host in hosts.items():
            self.daemons.append(host.start(["slurmd", "-D", "-N", name], folder / f"{name}.out"))
        self.make_idle()

    def make_idle(self):
        """Ends all jobs, and waits until the hosts are idle."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(AssertionError):  # The controller does not answer yet.
                jobs = call("squeue", "--noheader", "--format=%A").split()
                if jobs:
                    call("scancel", "--signal=KILL", "--full", *jobs)
                    call("scancel", *jobs)
                states = call("sinfo", "--noheader", "--Node", "--format=%T").split()
                if not jobs and states == ["idle"] * len(ADDRESSES):
                    return
                if any("down" in state for state in states):
                    call("scontrol", "update", "NodeName=n[1-2]", "State=RESUME")
            said = "\n".join(daemon.text[-2000:] for daemon in self.daemons)
            assert time.monotonic() < deadline, f"Slurm's hosts do not become idle:\n{said}"
            time.sleep(0.5)
