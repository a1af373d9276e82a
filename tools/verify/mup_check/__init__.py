"""`megaprec mup-check`: whether activations move equally far at all widths."""
