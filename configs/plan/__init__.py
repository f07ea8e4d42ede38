"""Configs of large models, only for the planner: the models are not trained here."""
