"""Layouts on many devices, in closed form."""
