"""Programs are read: collectives, memory, layouts and budgets."""
