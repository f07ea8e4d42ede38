"""Our models and their losses."""
