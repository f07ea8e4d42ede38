"""Generates text with a cache of keys and values, and scores given texts."""

from manualpar.models.generation.generator import Answer, Generator, TextPiece, generate
from manualpar.models.generation.speculative import Draft

__all__ = ["Answer", "Draft", "Generator", "TextPiece", "generate"]
