"""Quantized numbers keep their mean, and the errors of rounding are corrected."""
