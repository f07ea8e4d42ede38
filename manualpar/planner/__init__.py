"""Plans a step on devices that are not here: its collectives, its memory and its time.

In reading order: `hardware` and `topology` describe the devices, `step_work` the work of a traced
step on each, and `roofline` turns both into a `StepEstimate` (in `plan`). For TPUs `tpu_compiler`
has XLA compile the step, in the process of `tpu_worker`; `tpu_timeline` follows the compiled
program with a clock, and `compiled_plan` turns that into a `StepEstimate`, or `out_of_memory` says
which buffers do not fit. `sweep` compares strategies by the roofline. `plan_report` and
`plan_picture` show the results.
"""
