"""The updates of a rank that are not element by element: of whole matrices by Muon, and of
parameters from counts."""

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.group_factors import Group
from megaprec.optim.load_balance import LoadBalance
from megaprec.optim.matrix_updates import MatrixUpdates
from megaprec.optim.model_intake import Ranks
from megaprec.optim.update_rules import UpdateRule


def whole_updates(
    rule: UpdateRule,
    buffers: Sequence[Buffer],
    groups: Sequence[Group],
    mesh: DeviceMesh | None,
    ranks: Ranks,
) -> list[MatrixUpdates | LoadBalance]:
    """Return those updates that have anything to update. Collective over the world if the rule is
    Muon."""
    matrices = MatrixUpdates.of(rule, buffers, groups, mesh, ranks)
    return [updates for updates in (matrices, LoadBalance(buffers)) if updates.buffers]
