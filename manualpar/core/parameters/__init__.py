"""Where a parameter is stored, how it is gathered, and the dtype or code in which it is sent."""
