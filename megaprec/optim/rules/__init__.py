"""Update rules, groups of parameters, and the schedule of the learning rate."""
