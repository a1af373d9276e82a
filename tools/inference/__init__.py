"""Text from a trained model, and its loss on texts."""
