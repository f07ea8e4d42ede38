"""Linen models: their adapter, which registers itself when `manualpar.linen.linen_model` is imported."""
