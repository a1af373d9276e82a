"""Progress, model and tokenizer in the checkpoint of a run."""
