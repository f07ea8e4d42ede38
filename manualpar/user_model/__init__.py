"""What is known of the user's model and loss: how they are called, what they do with variables."""
