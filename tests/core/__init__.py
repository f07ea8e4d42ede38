"""What a program is and does."""
