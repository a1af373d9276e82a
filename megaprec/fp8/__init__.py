"""FP8: formats, scales, amax histories, quantized products, FP8 weights."""
