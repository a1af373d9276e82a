"""The speed of messages over each axis.

Ranks are numbered along tensor, context, data and pipeline, so neighbours of an inner axis are in
one machine. Where an axis leaves the machine, collectives use the network cards of all its ranks
that are in one machine, for these pass on parts of the message side by side.
"""

from dataclasses import dataclass
from math import comb

from models.config import ModelConfig
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.config.rules.expert_ranks import expert_slices
from tools.config.run_file import RunConfig


@dataclass(frozen=True)
class Link:
    """The speed of an axis.

    bandwidth: bytes a second in each direction.
    latency: seconds of a collective, however small.
    """

    bandwidth: float
    latency: float = 0.0


def link_of(inner: int, ranks: int, assumed: Assumptions) -> Link:
    """Return the link of collectives over `ranks` ranks of which each is `inner` ranks from the
    next."""
    machine = assumed.machine
    if ranks == 1 or inner * ranks <= machine:
        hops = ranks - 1
        return Link(assumed.fast * 1e9, hops * assumed.hop)
    ranks_in_machine = max(1, machine // inner)
    # as many network cards as ranks, until these are as fast as the links in the machine
    bandwidth = min(assumed.fast, ranks_in_machine * assumed.slow)
    machines = -(-ranks // ranks_in_machine)  # rounded up
    # first within each machine, then between machines
    hops = ranks_in_machine - 1 + machines - 1
    return Link(bandwidth * 1e9, hops * assumed.hop)


def axis_links(config: RunConfig, assumed: Assumptions) -> dict[str, Link]:
    """Return the links of tp, cp, dp, pp and of the ranks that share experts, by axis."""
    parallel = config.parallel
    sequence_ranks = parallel.tensor * parallel.context
    replica_ranks = sequence_ranks * parallel.data
    links = {
        "tp": link_of(1, parallel.tensor, assumed),
        "cp": link_of(parallel.tensor, parallel.context, assumed),
        # replicas of a weight are the context-parallel ranks too
        "dp": link_of(parallel.tensor, parallel.copies, assumed),
        "pp": Link(assumed.slow * 1e9),
        "experts": _expert_link(config, assumed),
    }
    # a ring sends from neighbour to neighbour, so between machines over one card
    if config.engine_options.ring and sequence_ranks > assumed.machine:
        latency = links["cp"].latency
        links["cp"] = Link(assumed.slow * 1e9, latency)
    all_ranks = replica_ranks * parallel.pipeline
    if all_ranks <= assumed.machine:
        links["pp"] = Link(assumed.fast * 1e9)
    return links


def _expert_link(config: RunConfig, assumed: Assumptions) -> Link:
    """Return the link of tokens on their way to experts, each of which goes to its rank directly.

    Those for other machines leave by the rank's own card.
    """
    parallel = config.parallel
    slices = expert_slices(parallel)
    # the other groups of experts, and the groups of a machine; a group is on `slices` ranks
    others = parallel.expert - 1
    in_machine = max(1, assumed.machine // slices)
    latency = others * assumed.hop
    if parallel.expert == 1 or parallel.expert * slices <= assumed.machine:
        return Link(assumed.fast * 1e9, latency)
    share_within = min(in_machine - 1, others) / others
    share_between = 1 - share_within
    if assumed.rows_once:
        # a row goes to each machine once, however many of the token's experts are there
        machines = parallel.expert / in_machine
        rows_between = machines_of_token(config.model, machines)
        share_between *= rows_between / config.model.experts_per_token
    seconds_of_byte = share_within / assumed.fast + share_between / assumed.slow
    return Link(1e9 / seconds_of_byte, latency)


def machines_of_token(model: ModelConfig, machines: float) -> float:
    """Return the mean number of machines that have some of a token's experts, which are drawn at
    random from the groups that its router takes, and these from all.

    machines: over which the experts are spread.
    """
    groups = model.router.groups
    groups_per_token = model.router.groups_per_token
    # a machine has whole groups, or a part of one
    groups_of_machine = max(1, round(groups / machines))
    # the choices of groups by the router, and those among them without a group of the machine
    ways = comb(groups, groups_per_token)
    ways_without_machine = comb(groups - groups_of_machine, groups_per_token)
    share_with_group = 1 - ways_without_machine / ways
    # parts of groups are rounded to whole ones, and no token goes to less than one machine
    reached = max(1.0, machines * share_with_group)
    # of the reached machines, the mean number that have one of the token's experts
    missed_by_all = (1 - 1 / reached) ** model.experts_per_token
    return reached * (1 - missed_by_all)
