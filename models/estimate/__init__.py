"""FLOPs and memory of a model, before it is built."""
