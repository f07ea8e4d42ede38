"""Linen models: their adapter, which registers itself when `manualpar.linen.model` is imported."""
