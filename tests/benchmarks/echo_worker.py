"""A process for `benchmarks.process_group` to talk to."""

import os
from typing import Any

from benchmarks.process_group import peak_memory, read_settings, serve

SIZE = 64 * 2**20


def main() -> None:
    settings = read_settings()

    def echo(**arguments: Any) -> dict[str, Any]:
        print("a library says something")
        cores = sorted(os.sched_getaffinity(0))
        return {
            "process": settings["process"],
            "word": settings["word"],
            "cores": cores,
        } | arguments

    def fail() -> dict[str, Any]:
        if settings["process"] == 1:
            raise ValueError("this one fails")
        return {}

    def hold() -> dict[str, Any]:
        before = peak_memory()
        block = b"x" * SIZE
        held = peak_memory()
        del block
        return {"before": before, "held": held}

    serve({"echo": echo, "fail": fail, "hold": hold})


if __name__ == "__main__":
    main()
