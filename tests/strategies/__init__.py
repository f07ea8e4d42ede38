"""Strategies from their registration on; `laws` holds what they have in common."""
