"""Tables, progress bars and TOML on a terminal."""
