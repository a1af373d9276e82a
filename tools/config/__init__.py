"""The run file: its keys, their defaults and help, and the rules between them."""
