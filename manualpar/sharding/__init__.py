"""Meshes, annotations, and the layout that follows from them."""
