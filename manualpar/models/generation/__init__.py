"""Text from trained models, with a cache of keys and values; what they say of given texts."""

from manualpar.models.generation.generator import Answer, Generator, TextPiece, generate

__all__ = ["Answer", "Generator", "TextPiece", "generate"]
