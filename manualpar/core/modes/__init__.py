"""The modes: this package writes the collectives (manual), or XLA does (auto, explicit)."""
