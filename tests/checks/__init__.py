"""What would be wrong in silence is refused."""
