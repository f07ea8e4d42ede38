"""NNX models: their adapter registers itself when `manualpar.nnx.nnx_model` is imported."""
