"""NNX models: their adapter, which registers itself when `manualpar.nnx.model` is imported."""
