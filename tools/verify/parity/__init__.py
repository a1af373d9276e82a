"""`megaprec parity`: the check that a layout trains the same model as one process."""
