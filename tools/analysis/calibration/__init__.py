"""The speeds of a machine, measured once: products, attention, layers, memory and collectives."""
