"""The copies that several ranks hold of one tensor, and whether they are equal."""

from collections.abc import Mapping

from megaprec.comm.gathered_texts import gather_entries
from megaprec.comm.tensor_digests import hexadecimal
from megaprec.diagnose.held_state import Holders, compare, digest_held_state
from megaprec.optim.ranks import sharing_replicas
from models.engine.engine import Engine


def holders(engine: Engine) -> tuple[Holders, Holders | None]:
    """Return the ranks that hold the same weights, and those that hold the same experts if these
    lie apart."""
    optimizer = engine.optimizer
    # with the ranks of cp, which hold the same weights
    replicas = optimizer.dp
    # Ranks that share masters and moments hold different parts of these.
    zero_size = optimizer.shards.size  # ranks of ZeRO-1
    weights = Holders(replicas, zero_size, engine.tp)
    experts = engine.experts
    if experts is None:
        return weights, None
    if zero_size == replicas.size:
        sharing = experts.replicas.size
    else:
        sharing = sharing_replicas(engine.tp.size, zero_size, experts.spread.size, experts.tp.size)
    return weights, Holders(experts.replicas, sharing, experts.tp)


def differing_copies(engine: Engine) -> list[str]:
    """Return the names of tensors of which ranks hold different copies, between two steps: of
    weights, masters, moments and the moving average; the same on every rank.

    Collective over the world. Waits for weights that are still gathered.
    """
    optimizer = engine.optimizer
    optimizer.wait()
    held = digest_held_state(optimizer.all_buffers(), engine.stages.values(), with_gradients=False)
    agreement = compare(held, engine.pp, *holders(engine), optimizer.device)
    if not optimizer.world.max_(agreement.weights.float()).item():
        return []
    digests = {one.key: hexadecimal(one.digest) for one in held}
    rank = str(optimizer.world.rank)
    of_ranks = gather_entries({rank: digests}, optimizer.world, optimizer.device)
    return _that_differ(of_ranks)


def _that_differ(of_ranks: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the keys whose digests are not the same on all ranks that have them."""
    seen: dict[str, set[str]] = {}
    for digests in of_ranks.values():
        for key, digits in digests.items():
            seen.setdefault(key, set()).add(digits)
    return sorted(key for key, values in seen.items() if len(values) > 1)
