"""Configs of the experiments: each file has a `get_config()`."""
