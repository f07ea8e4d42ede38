"""What is refused, and the words for it."""
