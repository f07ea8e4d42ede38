"""Estimates a step on devices that are not here: its collectives, its memory and its time.

In reading order: `hardware` and `topology` describe the devices, `step_work` the work of a traced
step on each device, `timed_collectives` the seconds of its collectives, and `roofline` makes a
`StepEstimate` (in `plan`) from the devices and the work. `compiled_timeline` computes when each
instruction of a compiled program runs, and `compiled_plan` makes a `StepEstimate` from this
timeline, or names the largest buffers of a program that does not fit.
"""
