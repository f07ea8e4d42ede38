"""Tables, bars and pictures that commands show."""
