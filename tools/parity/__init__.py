"""Whether a layout trains the same model as one process: `megaprec parity`."""
