import os
import queue
import signal
import subprocess
import sys
import time

import pytest

from manualpar.system.cluster import launch
from tests.paths import ROOT

HANG_SECONDS = 60
# `python -m manualpar.launch`, but without the rooms' `__init__`, which import jax.
MAIN = f"""
import sys, types
for name in ("manualpar", "manualpar.system", "manualpar.system.cluster"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [{str(ROOT)!r} + "/" + name.replace(".", "/")]
from manualpar.system.cluster.launch import main
sys.exit(main(sys.argv))
"""


def command(code):
    return ["--", sys.executable, "-c", code]


def start_launcher(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def launched(*arguments):
    popen = start_launcher(*arguments)
    out, err = popen.communicate(timeout=HANG_SECONDS)
    return popen.returncode, sorted(out.splitlines()), sorted(err.splitlines())


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_line_says_whose_it_is():
    code = "import sys; print('a'); print('b', end=''); print('c', file=sys.stderr)"
    assert launched("--processes=2", *command(code)) == (
        0,
        ["[0] a", "[0] b", "[1] a", "[1] b"],
        ["[0] c", "[1] c"],
    )


def test_every_process_knows_which_it_is():
    names = ["NUM_PROCESSES", "PROCESS_ID", "COORDINATOR_ADDRESS"]
    code = f"""import os
print(*[os.environ['MANUALPAR_' + n] for n in {names}], os.environ.get('JAX_NUM_CPU_DEVICES'))"""
    code_, out, _ = launched("--processes=3", "--devices-per-process=4", *command(code))
    assert code_ == 0
    fields = [line.split() for line in out]
    assert [(f[0], f[1], f[2], f[4]) for f in fields] == [
        (f"[{i}]", "3", str(i), "4") for i in range(3)
    ]
    assert len({f[3] for f in fields}) == 1
    assert fields[0][3].startswith("127.0.0.1:")


def test_the_code_is_that_of_the_first_that_failed_and_the_others_may_end_by_themselves():
    code = """import os, sys, time
if os.environ['MANUALPAR_PROCESS_ID'] == '1': sys.exit(7)
time.sleep(1); print('noticed'); sys.exit(4)"""
    assert launched("--processes=2", *command(code))[:2] == (7, ["[0] noticed"])


def test_a_signal_counts_as_a_shell_counts_it_and_is_named():
    code = """import os, time
if os.environ['MANUALPAR_PROCESS_ID'] == '1': os.kill(os.getpid(), 9)
time.sleep(1)"""
    assert launched("--processes=2", *command(code)) == (
        137,
        [],
        ["process 1 was ended by SIGKILL"],
    )


class Scripted:
    """A process that has ended in the poll after those for which its status is None."""

    def __init__(self, *statuses):
        self.statuses, self.returncode = list(statuses), None

    def poll(self):
        if self.returncode is None:
            self.returncode = self.statuses.pop(0)
        return self.returncode

    def send_signal(self, number):
        """Ends by itself, later than the signal."""


@pytest.mark.parametrize(
    ("processes", "code", "sentence"),
    [
        # All end within one poll.
        ([[0], [0]], 0, ""),
        ([[-9], [-9]], 137, "processes 0, 1 were ended by SIGKILL"),
        ([[3], [0], [3]], 3, "processes 0, 2 ended with exit code 3"),
        ([[3], [5]], 3, "process 0 ended with exit code 3\nprocess 1 ended with exit code 5"),
        ([[4], [-9], [0]], 137, "process 1 was ended by SIGKILL"),
        ([[4], [-6]], 134, "process 1 was ended by SIGABRT"),
        ([[-6], [4], [-11]], 139, "process 2 was ended by SIGSEGV"),
        ([[-40]], 168, "process 0 was ended by signal 40"),
        # One after another, but a killed process ends later than it loses its connections.
        ([[None, 4], [-9]], 137, "process 1 was ended by SIGKILL"),
        ([[4], [None, -9]], 137, "process 1 was ended by SIGKILL"),
        ([[-6], [None, -9]], 137, "process 1 was ended by SIGKILL"),
        ([[7], [None, 4]], 7, "process 0 ended with exit code 7"),
        ([[7], [None, -6]], 7, "process 0 ended with exit code 7"),
        ([[0], [None, 1]], 1, "process 1 ended with exit code 1"),
    ],
)
def test_who_failed_first_is_named_whenever_the_others_end(capsys, processes, code, sentence):
    started = [Scripted(*statuses) for statuses in processes]
    assert launch._watch(started, queue.SimpleQueue(), 15.0) == code
    assert capsys.readouterr().err == (sentence and sentence + "\n")


@pytest.mark.parametrize(
    ("number", "statuses", "code", "sentence"),
    [
        (signal.SIGTERM, [[None, 7], [None, -9]], 137, ""),
        (signal.SIGTERM, [[None, 75], [None, None, -9]], 75, ""),
        (signal.SIGUSR1, [[None, 75], [None, 75]], 75, ""),
        (signal.SIGUSR1, [[None, -9]], 137, "process 0 was ended by SIGKILL\n"),
    ],
)
def test_who_ends_because_of_a_forwarded_signal_is_not_named(
    capsys, number, statuses, code, sentence
):
    signals = queue.SimpleQueue()
    signals.put(number)
    assert launch._watch([Scripted(*each) for each in statuses], signals, 15.0) == code
    assert capsys.readouterr().err == sentence


def test_all_have_the_same_token_and_every_launch_another():
    code = "import os; print(os.environ['MANUALPAR_TOKEN'])"
    _, one, _ = launched("--processes=2", *command(code))
    _, other, _ = launched("--processes=1", *command(code))
    tokens = [line.split()[1] for line in (*one, *other)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert len(tokens[0]) == 32


def test_who_does_not_end_after_sigterm_is_killed():
    code = """import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)
time.sleep(300)"""
    popen = start_launcher("--processes=2", "--grace=1", *command(code))
    assert sorted(popen.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    popen.send_signal(signal.SIGTERM)
    _, err = popen.communicate(timeout=HANG_SECONDS)
    assert popen.returncode == 128 + signal.SIGKILL
    assert err == "killed, because it did not end: process 0, 1\n"


@pytest.mark.slow
def test_who_does_not_end_is_ended():
    code = """import os, signal, sys, time
if os.environ['MANUALPAR_PROCESS_ID'] == '1': sys.exit(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(300)"""
    code_, out, _ = launched("--processes=2", "--grace=1", *command(code))
    assert code_ == 1
    assert not is_running(int(out[0].split()[1]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_all_and_a_second_kills(number):
    code = """import signal, time
for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, lambda n, f: print('got', n, flush=True))
print('ready', flush=True)
while True: time.sleep(1)"""
    popen = start_launcher("--processes=2", *command(code))
    lines = sorted(popen.stdout.readline() for _ in range(2))
    assert lines == ["[0] ready\n", "[1] ready\n"]
    popen.send_signal(number)
    lines = sorted(popen.stdout.readline() for _ in range(2))
    assert lines == [f"[0] got {number}\n", f"[1] got {number}\n"]
    popen.send_signal(number)
    popen.communicate(timeout=HANG_SECONDS)
    assert popen.returncode == 128 + signal.SIGKILL


def test_every_sigusr1_goes_to_all_and_none_kills():
    code = """import signal, time
got = lambda n, f: print('got', n, flush=True)
for n in (signal.SIGUSR1, signal.SIGTERM): signal.signal(n, got)
print('ready', flush=True)
while True: time.sleep(1)"""
    popen = start_launcher("--processes=1", *command(code))
    assert popen.stdout.readline() == "[0] ready\n"
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        popen.send_signal(number)
        assert popen.stdout.readline() == f"[0] got {number}\n"
    popen.send_signal(signal.SIGTERM)
    popen.communicate(timeout=HANG_SECONDS)
    assert popen.returncode == 128 + signal.SIGKILL


@pytest.mark.slow
def test_what_the_processes_started_ends_with_them():
    code = """import subprocess, sys
print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']).pid, flush=True)"""
    _, out, _ = launched("--processes=1", *command(code))
    deadline = time.monotonic() + HANG_SECONDS
    while is_running(int(out[0].split()[1])):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_command_needs_no_dashes_before_it(tmp_path):
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    given = ("--processes", "1", str(tmp_path / "train.py"), "--num_steps=3", "--", "x")
    assert launched(*given) == (0, ["[0] ['--num_steps=3', '--', 'x']"], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes=2"], "no command, expected one after the flags"),
        (["--processes=2", "--"], "no command, expected one after the flags"),
        (["--processes=0", "--", "x"], "--processes=0: expected a positive integer"),
        (["--processes=two", "--", "x"], "--processes=two: expected an integer"),
        (["--", "x"], "--processes=NUMBER is missing: The number of processes."),
        (["--processes=2", "--devices-per-process=-1", "--", "x"], "expected a positive integer"),
        (["--processes=2", "--grace=nan", "--", "x"], "--grace=nan: expected a number of seconds"),
        (
            ["--processes=2", "--proces=3", "--", "x"],
            "--proces is not a known flag; the nearest one is --processes",
        ),
    ],
)
def test_mistakes_are_a_sentence(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        launch.main(["launch", *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_command_that_is_not_there(capsys):
    assert launch.main(["launch", "--processes=2", "--", "/no/such/command"]) == 127
    assert "'/no/such/command' cannot be started" in capsys.readouterr().err
