"""InternEvo's parallel modes (its names for groups of ranks), and the mesh axes that they mean.

InternEvo's modes are members of an enumeration, looked up in a global context. Here a mode is
looked up on the mesh that is passed with it. Without a mesh, DATA means the whole world, and only
if every rank must be a data-parallel replica. A caller may also pass the group itself, as an
`Axis`, a torch process group or a DeviceMesh of one dim.
"""

from collections.abc import Sequence
from enum import Enum

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import has_layout, layout_of
from megaprec.errors import UserError, did_you_mean


class ParallelMode(Enum):
    """InternEvo's modes (`internlm/core/context/process_group_initializer.py`), by its names and
    values."""

    GLOBAL = "global"
    DATA = "data"
    MODEL = "model"
    PIPELINE = "pipe"
    TENSOR = "tensor"
    ZERO1 = "zero1"
    NETTEST = "nettest"
    ZERO3_DP = "zero3_dp"
    EXPERT = "expert"
    EXPERT_DATA = "expert_data"
    DUMMY = "dummy"
    WEIGHT = "weight"
    WEIGHT_DATA = "weight_data"
    SEQUENCE = "sequence"
    GQA = "gqa"


Group = Axis | dist.ProcessGroup | DeviceMesh | Enum | str
"""A group of ranks, or the mode that means one: a member of any enumeration with those names, or
its name or value."""

_DIMS = {
    ParallelMode.DATA: (("dp", "data"),),
    ParallelMode.TENSOR: (("tp", "tensor"),),
    ParallelMode.PIPELINE: (("pp", "pipe"),),
    ParallelMode.MODEL: (("pp", "pipe"), ("tp", "tensor")),
}
"""The mesh dims of each mode; each dim is a tuple of the names that it may have."""

_REMEDY = "give its Axis, process group or DeviceMesh dim as parallel_mode"


def known_group(
    group: Group, mesh: DeviceMesh | None
) -> Axis | dist.ProcessGroup | DeviceMesh | ParallelMode:
    """Return `group` itself, or the mode that it names; a string may name a dim of `mesh`.

    Raises UserError for anything else.
    """
    if isinstance(group, Axis | dist.ProcessGroup | DeviceMesh):
        return group
    if isinstance(group, str) and mesh is not None and group in (mesh.mesh_dim_names or ()):
        return Axis.of(mesh, group)
    return mode_of(group)


def axes_of(group: Group, mesh: DeviceMesh | None, model: nn.Module) -> tuple[Axis, ...]:
    """Return the axes whose ranks together form the group, without axes of size one.

    mesh: the mesh on which a mode is looked up. model: its parameters may show that it is sharded
    over ranks. Raises UserError for an unknown group, and on a rank that is not a member of the
    group.
    """
    known = known_group(group, mesh)
    axes: Sequence[Axis]
    if isinstance(known, ParallelMode):
        axes = _axes_of_mode(known, mesh, model)
    elif isinstance(known, DeviceMesh):
        axes = [_axis_of_mesh(known)]
    elif isinstance(known, Axis):
        axes = [known]
    else:
        axes = [_axis_of_group("group", known)]
    return tuple(axis for axis in axes if axis.size > 1)  # one rank has nobody to average with


def mode_of(name: object) -> ParallelMode:
    """Return the mode that a member of any enumeration, or a string, names. Raises UserError if it
    names none."""
    # a string may have the enumeration before it: "ParallelMode.DATA"
    mode_name = name.name if isinstance(name, Enum) else str(name).rpartition(".")[2]
    mode_name = mode_name.lower()
    modes = {mode.value: mode for mode in ParallelMode}
    modes |= {mode.name.lower(): mode for mode in ParallelMode}
    if not isinstance(name, Enum | str) or mode_name not in modes:
        raise UserError.of(
            "precision.parallel_mode_unknown",
            name=name,
            names=", ".join(ParallelMode.__members__),
            hint=did_you_mean(mode_name, modes),
        )
    return modes[mode_name]


def _axes_of_mode(mode: ParallelMode, mesh: DeviceMesh | None, model: nn.Module) -> Sequence[Axis]:
    """Return the axes of a mode, none if there is one process only."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ()
    # without a mesh the world is the group of replicas only if every rank must be one
    all_are_replicas = mode is ParallelMode.DATA and mesh is None and _is_plain(model)
    if mode is ParallelMode.GLOBAL or all_are_replicas:
        return (_axis_of_group("world", dist.group.WORLD),)
    if mode not in _DIMS:
        raise UserError.of("precision.parallel_mode_unmapped", mode=mode, give=_REMEDY)
    if mesh is None:
        if mode is ParallelMode.DATA:
            why = "the world is cut into groups or the model over ranks"
        else:
            why = "without a mesh"
        raise UserError.of("precision.parallel_mode_unused", mode=mode, why=why, give=_REMEDY)
    return [_axis_of_dim(mesh, names, mode) for names in _DIMS[mode]]


def _axis_of_dim(mesh: DeviceMesh, names: Sequence[str], mode: ParallelMode) -> Axis:
    """Return the axis of the dim of `mesh` that has one of these names. mode: for the error."""
    for name in mesh.mesh_dim_names or ():
        if name in names:
            return Axis.of(mesh, name)
    dims = ", ".join(mesh.mesh_dim_names or ()) or "no names"
    raise UserError.of(
        "precision.parallel_mode_dim", mode=mode, dims=dims, names=" or ".join(names), give=_REMEDY
    )


def _axis_of_mesh(mesh: DeviceMesh) -> Axis:
    """Return the axis of a mesh of one dim."""
    if mesh.ndim != 1:
        raise UserError.of("precision.parallel_mode_dims", ndim=mesh.ndim)
    (name,) = mesh.mesh_dim_names or ("group",)
    return _axis_of_group(name, mesh.get_group())


def _axis_of_group(name: str, group: dist.ProcessGroup | None) -> Axis:
    """Return the axis of a process group; None is the world. Raises UserError on a rank outside of
    it."""
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    if rank < 0:
        raise UserError.of("precision.parallel_mode_not_member")
    return Axis(name, rank, size, group if size > 1 else None)


def _is_plain(model: nn.Module) -> bool:
    """Return True if every rank must have a replica: the world was never split into groups, and no
    parameter is sharded."""
    # a smaller group shows that ranks have different tasks; torch has no public list of groups
    world_size = dist.get_world_size()
    for group in list(dist.distributed_c10d._world.pg_map):
        if len(dist.get_process_group_ranks(group)) < world_size:
            return False
    return not any(_is_spread(parameter) for parameter in model.parameters())


def _is_spread(parameter: nn.Parameter) -> bool:
    """Return True if the parameter's layout shards or replicates it over ranks, or if it is a
    DTensor."""
    if hasattr(parameter, "placements"):  # a DTensor
        return True
    if not has_layout(parameter):
        return False
    layout = layout_of(parameter)
    ranks_of_parts = [part.shards * part.copies for part in layout.parts]
    return bool(layout.tied) or max(ranks_of_parts, default=1) > 1
