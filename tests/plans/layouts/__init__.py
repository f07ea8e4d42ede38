"""Layouts on many devices, by formula."""
