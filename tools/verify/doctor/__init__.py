"""`megaprec doctor`: the checks of a machine, or of all hosts of a launched world."""
