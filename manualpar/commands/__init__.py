"""The commands `train`, `inspect`, `plan`, `generate` and others."""
