"""Where parameters are stored, and their gathers with their gradients."""
