"""Named scopes, and reading jaxprs."""
