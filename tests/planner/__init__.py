"""What a step would take on devices that nobody here has; `tpu/` is from its compiler."""
