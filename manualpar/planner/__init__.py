"""What a step would take on devices that nobody here has: a compiler's word, or a model's.

`tpu_compiler` has XLA's TPU compiler compile the step for a topology and reads what it has made;
`roofline` is arithmetic on the traced program. Both end in a `plan.Plan`.
"""
