"""Attention: in blocks, in kernels, and over a split sequence."""
