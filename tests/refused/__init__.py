"""Tables of users' mistakes, with the error that each must raise before XLA compiles anything."""
