"""Linen models; importing `linen_model` registers their interface."""
