"""From token files to samples, in an order that does not depend on the layout."""
