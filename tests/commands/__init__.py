"""What is typed: from a command line to what it leaves behind."""
