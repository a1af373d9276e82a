"""`megaprec plan`: the memory of each rank, the predicted step, and the layouts that fit."""
