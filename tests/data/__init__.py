"""Examples by number, batches on devices, and text, tokens and chats."""
