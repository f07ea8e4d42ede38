"""Named scopes, and functions that read jaxprs."""
