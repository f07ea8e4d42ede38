"""Checks of programs and arrays that nobody needs to read in order to follow a step."""
