"""From text to token files: sources, readers, tokenizers, and the building of data sets."""
