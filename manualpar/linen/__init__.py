"""Linen models: their adapter registers itself when `manualpar.linen.linen_model` is imported."""
