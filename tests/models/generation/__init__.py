"""Answers and scores of a model."""
