"""Steps of a run repeated on one process, to explain overflows and loss spikes."""
