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
    # Replicas that share masters and moments (ZeRO-1) hold different parts of these.
    num_sharing = optimizer.shards.size
    weights = Holders(replicas, num_sharing, engine.tp)
    experts = engine.experts
    if experts is None:
        return weights, None
    if num_sharing == replicas.size:
        num_sharing_experts = experts.replicas.size
    else:
        num_sharing_experts = sharing_replicas(
            engine.tp.size, num_sharing, experts.spread.size, experts.tp.size
        )
    return weights, Holders(experts.replicas, num_sharing_experts, experts.tp)


def differing_copies(engine: Engine) -> list[str]:
    """Return the names of tensors of which ranks hold different copies, between two steps: of
    weights, masters, moments and the moving average; the same on every rank.

    Collective over the world. Waits for weights that are still gathered.
    """
    optimizer = engine.optimizer
    optimizer.wait()
    held = digest_held_state(optimizer.all_buffers(), engine.stages.values(), with_gradients=False)
    # `weights` of the result covers all that is held here, masters and moments too
    agreement = compare(held, engine.pp, *holders(engine), optimizer.device)
    if not optimizer.world.max_(agreement.weights.float()).item():
        return []
    own_digests = {tensor.key: hexadecimal(tensor.digest) for tensor in held}
    rank = str(optimizer.world.rank)
    digests_by_rank = gather_entries({rank: own_digests}, optimizer.world, optimizer.device)
    return _differing_names(digests_by_rank)


def _differing_names(digests_by_rank: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the names of tensors whose digests are not the same on all ranks that have them,
    sorted. digests_by_rank: by rank and by name."""
    digests_by_name: dict[str, set[str]] = {}
    for digests in digests_by_rank.values():
        for name, digest in digests.items():
            digests_by_name.setdefault(name, set()).add(digest)
    return sorted(name for name, digests in digests_by_name.items() if len(digests) > 1)
