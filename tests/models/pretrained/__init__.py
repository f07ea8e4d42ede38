"""Other people's weights, in and out."""
