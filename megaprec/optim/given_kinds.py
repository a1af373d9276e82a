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

# settings of a plan that layers read, in which theirs must agree with the optimizer's
_LAYER_SETTINGS = (
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
        raise UserError.of("optimizer.inference_mode")
    is_module_list = isinstance(parts, list | tuple | nn.ModuleList) and all(
        isinstance(part, nn.Module) for part in parts
    )
    # a class of rules, without parentheses, has the same attributes
    is_rule = not isinstance(rule, type) and hasattr(rule, "names") and hasattr(rule, "update_")
    is_virtual = isinstance(virtual, VirtualAxis | None)
    is_experts = isinstance(experts, ExpertAxes | None)
    # name, value, what it must be, whether it is that
    rules = [
        (
            "parts",
            parts,
            "a list of torch modules, like [model]; parameters are found in them",
            is_module_list,
        ),
        (
            "plan",
            plan,
            "a PrecisionPlan, like megaprec.plan('bf16')",
            isinstance(plan, PrecisionPlan),
        ),
        ("mesh", mesh, "a DeviceMesh or None", isinstance(mesh, DeviceMesh | None)),
        (
            "rule",
            rule,
            "an update rule, like megaprec.AdamW(betas=(0.9, 0.95)) or "
            "megaprec.TorchRule(torch.optim.RAdam)",
            is_rule,
        ),
        (
            "groups",
            groups,
            "a list of megaprec.Group(pattern, lr=..., weight_decay=...)",
            _is_list_of(groups, Group),
        ),
        ("observers", observers, "a list of StepObservers", _is_list_of(observers, StepObserver)),
        ("virtual", virtual, "a VirtualAxis or None", is_virtual),
        ("experts", experts, "the experts= of a Context, or None", is_experts),
    ]
    for name, value in switches.items():
        is_left_open = name == "average" and value is None
        rules.append((name, value, "True or False", is_left_open or isinstance(value, bool)))
    problems = [
        f"{name} = {quoted(value)}: must be {kind}"
        for name, value, kind, holds in rules
        if not holds
    ]
    if problems:
        raise UserError(*problems)
    _require_same_plan(parts, plan)  # type: ignore[arg-type]


def _is_list_of(values: object, kind: type) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, kind) for value in values)


def _require_same_plan(model_parts: Sequence[nn.Module], plan: PrecisionPlan) -> None:
    """Raise UserError, naming a module, if layers were built with a context of another plan.

    They would compute in dtypes of their own, from weights that the optimizer holds in others.
    Contexts of parts that are marked to stay in FP32 are left out.
    """
    for model_part in model_parts:
        for path, module in model_part.named_modules():
            layer_plan = getattr(getattr(module, "context", None), "plan", None)
            if not isinstance(layer_plan, PrecisionPlan):
                continue
            if layer_plan.keep_fp32 == ("*",):  # of a part that is marked to stay in FP32
                continue
            for name in _LAYER_SETTINGS:
                of_layer = getattr(layer_plan, name)
                of_optimizer = getattr(plan, name)
                if of_layer != of_optimizer:
                    raise UserError.of(
                        "optimizer.plans_differ",
                        path=path or type(module).__name__,
                        name=name,
                        of_layer=of_layer,
                        of_optimizer=of_optimizer,
                    )
