"""Small faults in lines of the training code, drawn at random, and whether fast laws find them."""
