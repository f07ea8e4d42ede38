"""Tests of the source itself: rules for imports and texts, packaging, configs, the CI files."""
