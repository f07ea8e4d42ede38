"""How a parameter is stored, how it is gathered, and in which format it is sent."""
