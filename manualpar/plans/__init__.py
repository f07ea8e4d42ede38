"""Plans the step of a config on devices that are not here.

`manualpar.planner` estimates the time of a traced or compiled step. This package makes these steps
from configs (`planned_experiment`). `tpu_compiler` and `gpu_compiler` let XLA compile a config's
step, in a process of `compiler_worker`. `sweep` compares strategies by the roofline. `layouts`
searches layouts of a transformer without tracing them. `plan_report` shows the results.
"""
