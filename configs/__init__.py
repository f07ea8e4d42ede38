"""What to run: one `get_config()` a file."""
