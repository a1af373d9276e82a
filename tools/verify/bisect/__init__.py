"""`megaprec bisect`: the place where two runs part."""
