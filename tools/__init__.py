"""Programs: the `megaprec` command and what it is made of."""
