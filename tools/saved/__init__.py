"""What a run's checkpoint holds besides tensors."""
