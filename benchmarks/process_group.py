"""Groups of processes that run tasks, one group at a time.

JAX and PyTorch cannot train in one process. So each library has a group of processes. A group stays
alive and waits while another group works, so that blocks of steps of both can take turns. A process
is started with one argument, a JSON object with its settings. It reads a line of JSON for each
task, and answers with a line of JSON.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Self

END_SECONDS = 20.0
ANSWER = "answer: "  # Marks answers, because libraries print to standard output too.

Handler = Callable[..., Mapping[str, Any]]


class ProcessGroup:
    """Processes that all run one module; a context manager that ends them."""

    def __init__(self, module: str, settings: Mapping[str, Any], *, num_processes: int) -> None:
        """Starts the processes, and does not wait: a process that fails is noticed by `ask`.

        Args:
          module: The module that each process runs, such as `"benchmarks.torch_compile_worker"`.
          settings: The settings of each process. The constructor adds `process` (its number),
            `num_processes`, `port` (a free port) and `cores` (the cores that it may use).
          num_processes: The number of processes.
        """
        self._module = module
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: list[IO[str]] = []
        port, cores = _free_port(), sorted(os.sched_getaffinity(0))
        for number in range(num_processes):
            own = {
                "process": number,
                "num_processes": num_processes,
                "port": port,
                # A single process has all cores; several processes share them evenly.
                "cores": cores if num_processes == 1 else [cores[number % len(cores)]],
                **settings,
            }
            self._errors.append(tempfile.TemporaryFile("w+", encoding="utf-8"))  # noqa: SIM115
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, json.dumps(own)],
                    cwd=Path(__file__).parent.parent,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors[-1],
                    text=True,
                )
            )

    def ask(self, task: str, **arguments: Any) -> list[dict[str, Any]]:
        """Runs a task in every process; returns the answers.

        Args:
          task: The name of a handler that the processes `serve`.
          **arguments: The handler's arguments.

        Returns:
          The result of the handler in each process.

        Raises:
          RuntimeError: A process has ended; the message contains the end of its output.
        """
        line = json.dumps({"task": task, **arguments}) + "\n"
        for number, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                self._fail(number)
        return [self._read(number) for number in range(len(self._processes))]

    def block(self, num_steps: int) -> float:
        """Runs `num_steps` steps in every process; returns the seconds of the slowest process."""
        return float(max(answer["seconds"] for answer in self.ask("block", steps=num_steps)))

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # This ends the process's loop.
        for process in self._processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for errors in self._errors:
            errors.close()

    def _read(self, number: int) -> dict[str, Any]:
        stdout = self._processes[number].stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith(ANSWER):
                answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return answer
        return self._fail(number)

    def _fail(self, number: int) -> Any:
        """Raises an error with the last output of a process that has ended."""
        self._processes[number].wait(END_SECONDS)
        self._errors[number].seek(0)
        text = self._errors[number].read()[-3000:]
        raise RuntimeError(f"process {number} of {self._module} has ended:\n{text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # After a failure the other processes of the group may wait forever for the failed process.
        if error[0] is not None:
            for process in self._processes:
                process.kill()
        self.close()


def read_settings() -> dict[str, Any]:
    """Reads this process's settings, and restricts the process and its threads to its cores."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    os.sched_setaffinity(0, settings["cores"])
    return settings


def serve(handlers: Mapping[str, Handler]) -> None:
    """Runs the tasks that standard input names, until it ends; prints the answers.

    Args:
      handlers: The function for each task. It gets the task's arguments by name, and returns a
        value that JSON can represent.
    """
    for line in sys.stdin:
        arguments = json.loads(line)
        answer = handlers[arguments.pop("task")](**arguments)
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)


def peak_memory() -> int:
    """Returns the peak resident memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _free_port() -> int:
    """Returns a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
