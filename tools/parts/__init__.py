"""Optional parts of the programs, each loaded when it is called."""
