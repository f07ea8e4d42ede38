"""What is typed on a command line: `train`, `inspect`, `plan`, `generate` and others."""
