"""Layouts of large models on thousands of devices, estimated by formula."""
