"""Meshes, the roles of their axes, and how a batch is divided over them."""
