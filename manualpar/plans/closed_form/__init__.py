"""Layouts of large models on thousands of devices, estimated in closed form."""
