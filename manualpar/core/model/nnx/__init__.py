"""NNX models; importing `nnx_model` registers their interface."""
