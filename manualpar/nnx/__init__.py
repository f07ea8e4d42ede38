"""NNX models: their adapter, which registers itself when `manualpar.nnx.nnx_model` is imported."""
