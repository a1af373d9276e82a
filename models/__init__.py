"""What is trained: decoders built from the parallel layers and cut into stages."""
