"""Groups of processes that are told what to do, one group at a time, and what a process can see.

Two libraries cannot train in one process. So each has a group of processes that are kept alive and
only wait while another group works, and blocks of steps can take turns as those of one process do.
A process is started with one argument, a JSON object; it gets a line of JSON for each thing to do
and answers with one.
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
ANSWER = "answer: "  # Libraries print to the standard output too.

Handler = Callable[..., Mapping[str, Any]]


class ProcessGroup:
    """Processes of one module. Use it as a context manager."""

    def __init__(self, module: str, settings: Mapping[str, Any], *, num_processes: int) -> None:
        """Starts them; `ask` them something to see whether they have.

        Args:
          module: What each runs, such as `"benchmarks.torch_compile_worker"`.
          settings: What each gets, besides `process`, its number, `num_processes`, `port`, a port
            that is free, and `cores`, those that it shall keep to.
          num_processes: How many.
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
                # One alone has them all, several share them evenly.
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
        """Has every process do something; returns their answers.

        Args:
          task: The name of one of the handlers that they `serve`.
          **arguments: Its arguments.

        Returns:
          What the handler returned in each.

        Raises:
          RuntimeError: A process has ended; the message has the end of what it wrote.
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
        """Takes steps; returns the seconds of the process that took longest."""
        return float(max(answer["seconds"] for answer in self.ask("block", steps=num_steps)))

    def close(self) -> None:
        """Ends them."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # They have nothing more to do then.
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
        """Says what a process that has ended wrote last."""
        self._processes[number].wait(END_SECONDS)
        self._errors[number].seek(0)
        text = self._errors[number].read()[-3000:]
        raise RuntimeError(f"process {number} of {self._module} has ended:\n{text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # Those of a group in which one has failed may wait for it without end.
        if error[0] is not None:
            for process in self._processes:
                process.kill()
        self.close()


def read_settings() -> dict[str, Any]:
    """The settings of this process; it keeps to its cores from now on, its threads too."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    os.sched_setaffinity(0, settings["cores"])
    return settings


def serve(handlers: Mapping[str, Handler]) -> None:
    """Does what it is asked until nobody asks any more.

    Args:
      handlers: What to call for a task, with its arguments by name; it returns what JSON has.
    """
    for line in sys.stdin:
        arguments = json.loads(line)
        answer = handlers[arguments.pop("task")](**arguments)
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _free_port() -> int:
    """A port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
