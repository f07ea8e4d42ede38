"""Plans a step on devices that nobody has: what it sends, holds and takes.

In reading order: `hardware` and `topology` describe the devices, `step_work` what a traced step
does on each, and `roofline` turns both into a `plan`. For TPUs `tpu_compiler` has XLA compile the
step, in the process of `tpu_worker`; `schedule` follows the compiled program with a clock, and
`compiled_plan` turns that into a `plan`, or `out_of_memory` says what does not fit. `sweep`
compares strategies by the roofline. `plan_report`, `plan_picture` and `command` show all that.
"""
