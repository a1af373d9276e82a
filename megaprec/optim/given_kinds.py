"""Checks of the kinds of what the optimizer is built from: modules, plan, mesh, rule, groups and
switches.

Python looks at no annotation. A text "no" would count as true, a generator of modules would be
empty when it is read a second time, and a model without its list would be taken for a list of its
layers.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.experts import ExpertAxes
from megaprec.comm.virtual import VirtualAxis
from megaprec.errors import UserError
from megaprec.kinds import quoted
from megaprec.optim.group_factors import Group
from megaprec.optim.observer import StepObserver
from megaprec.precision.plan import PrecisionPlan

_BY_LAYERS = (
    "compute",
    "residual",
    "pipeline",
    "attention",
    "parameters",
    "sensitive",
    "scores",
    "fp8",
    "tf32",
)


def require_kinds(
    parts: object,
    plan: object,
    mesh: object,
    rule: object,
    groups: object,
    observers: object,
    virtual: object,
    experts: object,
    **switches: object,
) -> None:
    """Raise UserError, naming all that are wrong, for arguments of another kind, and for layers of
    another plan.

    switches: those that are True or False; `average` may be left open. Also raised in inference
    mode, where the optimizer's memory could not be trained.
    """
    if torch.is_inference_mode_enabled():
        raise UserError(
            "the optimizer is built under torch.inference_mode, whose tensors no backward "
            "pass can use"
        )
    listed = isinstance(parts, list | tuple | nn.ModuleList) and all(
        isinstance(part, nn.Module) for part in parts
    )
    is_rule = not isinstance(rule, type) and hasattr(rule, "names") and hasattr(rule, "update_")
    rules = {
        (
            f"parts = {quoted(parts)}: must be a list of torch modules, like [model]; parameters "
            "are found in them"
        ): listed,
        f"plan = {quoted(plan)}: must be a PrecisionPlan, like megaprec.plan('bf16')": isinstance(
            plan, PrecisionPlan
        ),
        f"mesh = {quoted(mesh)}: must be a DeviceMesh or None": isinstance(mesh, DeviceMesh | None),
        f"rule = {quoted(rule)}: must be an update rule, like megaprec.AdamW(betas=(0.9, 0.95)) or "
        "megaprec.TorchRule(torch.optim.RAdam)": is_rule,
        (
            f"groups = {quoted(groups)}: must be a list of megaprec.Group(pattern, lr=..., "
            "weight_decay=...)"
        ): _are(groups, Group),
        f"observers = {quoted(observers)}: must be a list of StepObservers": _are(
            observers, StepObserver
        ),
        f"virtual = {quoted(virtual)}: must be a VirtualAxis or None": isinstance(
            virtual, VirtualAxis | None
        ),
        f"experts = {quoted(experts)}: must be the experts= of a Context, or None": isinstance(
            experts, ExpertAxes | None
        ),
    }
    rules |= {
        f"{name} = {quoted(value)}: must be True or False": isinstance(value, bool)
        for name, value in switches.items()
        if name != "average" or value is not None
    }
    if broken := [line for line, holds in rules.items() if not holds]:
        raise UserError(*broken)
    _require_same_plan(parts, plan)  # type: ignore[arg-type]


def _are(values: object, kind: type) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, kind) for value in values)


def _require_same_plan(parts: Sequence[nn.Module], plan: PrecisionPlan) -> None:
    """Raise UserError, naming a module, if layers were built with a context of another plan.

    They would compute in dtypes of their own, from weights that the optimizer holds in others.
    Contexts of parts that are marked to stay in FP32 are left out.
    """
    for part in parts:
        for path, module in part.named_modules():
            own = getattr(getattr(module, "context", None), "plan", None)
            if not isinstance(own, PrecisionPlan) or own.keep_fp32 == ("*",):
                continue
            for name in _BY_LAYERS:
                if (theirs := getattr(own, name)) != (mine := getattr(plan, name)):
                    raise UserError(
                        f"{path or type(module).__name__} was built with a plan that has "
                        f"{name} = {theirs}, but the "
                        f"optimizer's has {mine}: give Context and optimizer the same plan"
                    )
