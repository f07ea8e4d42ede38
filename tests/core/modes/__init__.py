"""Who writes the collectives, and how gradients are made."""
