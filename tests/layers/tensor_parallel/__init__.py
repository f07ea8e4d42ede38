"""Plans that split a model's layers."""
