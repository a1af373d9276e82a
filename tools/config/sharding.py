"""The ranks over which a run shards its optimizer's state."""

from models.estimate.state import Sharding
from tools.config.run_file import RunConfig


def sharding_of(config: RunConfig) -> Sharding:
    """Return how the run shards its state, or a virtual rank its own."""
    parallel = config.parallel
    sharers = 1
    if parallel.zero:
        sharers = parallel.zero_size or parallel.copies
    return Sharding(
        config.canonical_shards or parallel.tensor,
        parallel.copies,
        sharers,
        parallel.bucket,
        parallel.expert,
        parallel.expert_tensor,
        separate_head=config.canonical_shards > 0,
        gradients=parallel.shards_gradients,
        weights=parallel.shards_weights,
        ema=config.optimizer.ema > 0,
        offload=config.optimizer.offload == "host",
        frozen=config.optimizer.frozen,
    )
