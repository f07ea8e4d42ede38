"""The pages, the README and the site."""
