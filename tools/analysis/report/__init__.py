"""`megaprec report`: a page about a run."""
