"""Who writes the collectives: this package (manual), XLA (auto), or XLA by types (explicit)."""
