"""Plans a step on devices that are not here: its collectives, its memory and its time.

In reading order: `hardware` and `topology` describe the devices, `step_work` the work of a traced
step on each device, `timed_collectives` the seconds of its collectives, and `roofline` makes a
`StepEstimate` (in `plan`) from the devices and the work. `tpu_compiler` and
`gpu_compiler` let XLA compile the step for devices that are not here, in the process of
`compiler_worker`. `compiled_timeline` computes when each instruction of the compiled program runs
(with `gpu_costs` for GPUs), and `compiled_plan` makes a `StepEstimate` from this timeline. If the
program does not fit, `out_of_memory` names the largest buffers. `sweep` compares strategies by the
roofline. `plan_report` and `plan_picture` show the results.
"""
