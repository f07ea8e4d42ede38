"""Generates text with a cache of keys and values, and scores given texts."""

from manualpar.models.generation.generator import Answer, Generator, TextPiece, generate

__all__ = ["Answer", "Generator", "TextPiece", "generate"]
