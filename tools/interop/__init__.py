"""Files of other systems: their configurations, arguments and scripts."""
