"""Checks of a traced loss or step that refuse what would be wrong in silence."""
