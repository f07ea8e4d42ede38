"""The codes that a process of a cluster ends with, for schedulers to tell them apart."""

# An error of this process's own; its traceback is on the screen.
FAILED_EXIT_CODE = 1
# Another process is gone. Nothing is wrong with this one: start the run again.
LOST_PROCESS_EXIT_CODE = 4
# A second SIGTERM, before the run had come to its end: 128 + 15, as a shell has it.
TERMINATED_EXIT_CODE = 143
