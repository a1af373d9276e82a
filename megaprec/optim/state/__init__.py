"""State: flat buffers of masters and gradients, and what is kept beside them."""
