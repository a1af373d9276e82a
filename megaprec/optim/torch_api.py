"""Attributes of torch's optimizers that this project's has not, or has elsewhere, and that say so.

torch keeps moments in `state`, copies and pickles an optimizer, and calls hooks around its state.
Here moments lie in flat buffers that share memory with the model. An empty `state`, a copy without
buffers or a hook that is never called would be a silent loss.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from megaprec.errors import UserError, did_you_mean
from megaprec.optim.scaler import TWO_SCALERS

# Arguments that an optimizer is built with and does not look up again: its buffers and groups are
# made for them.
FIXED = [
    "lr",
    "weight_decay",
    "groups",
    "norm",
    "average",
    "overlap",
    "bucket",
    "seed",
    "canonical",
]
FIXED += ["zero_size", "parts", "plan", "mesh", "virtual", "experts", "rule"]
FIXED += ["betas", "eps", "momentum", "nesterov"]  # torch's, which the rule has here

_SETTABLE_ELSEWHERE = {
    "lr": "use optimizer.step(lr=...) or param_groups, whichever has it",
    "weight_decay": "use optimizer.param_groups",
}

_BY_CLIP = "the largest norm of the gradients is clip="
_BY_RULE = "it is an option of the update rule: rule=megaprec.AdamW({}=...)"
_BY_SGD = "it is an option of the update rule: rule=megaprec.SGD(momentum=...)"
_BY_TORCH = (
    "give a class of torch as the rule: rule=megaprec.TorchRule(torch.optim.AdamW, {{'{}': ...}})"
)
_BY_PLAN = "loss scaling is the plan's: megaprec.plan('fp16', megaprec.LossScaling('dynamic'))"
_ONE_KERNEL = "the update has one form, so leave it out"
_ELSEWHERE = {
    "betas": _BY_RULE,
    "eps": _BY_RULE,
    "momentum": _BY_SGD,
    "nesterov": _BY_SGD,
    "dampening": _BY_TORCH,
    "amsgrad": _BY_TORCH,
    "maximize": _BY_TORCH,
    "decoupled_weight_decay": (
        "AdamW's decay is decoupled, SGD's is part of the gradient, so leave it out"
    ),
    "foreach": _ONE_KERNEL,
    "fused": _ONE_KERNEL,
    "capturable": _ONE_KERNEL,
    "differentiable": _ONE_KERNEL,
    "max_grad_norm": _BY_CLIP,
    "max_norm": _BY_CLIP,
    "clip_grad": _BY_CLIP,
    "clip_grad_norm": _BY_CLIP,
    "grad_clip": _BY_CLIP,
    "gradient_clipping": _BY_CLIP,
    "gradient_clip_val": _BY_CLIP,
    "learning_rate": "it is lr=",
    "params": "give the modules, not their parameters: ParallelAMPOptimizer([model], plan, ...)",
    "model": "give a list of modules: ParallelAMPOptimizer([model], plan, ...)",
    "dtype": "precision is the plan's: megaprec.plan('bf16')",
    "precision": "precision is the plan's: megaprec.plan('bf16')",
    "scaler": _BY_PLAN,
    "grad_scaler": _BY_PLAN,
    "optimizer": "it is rule=, like megaprec.AdamW() or megaprec.TorchRule(torch.optim.RAdam)",
    "process_group": "ranks are those of mesh=, a DeviceMesh",
    "device": (
        "the optimizer takes the device of the mesh, or of the model: move the model there first"
    ),
}
_ACCELERATE = (
    "accelerate's prepare around ParallelAMPOptimizer: its wrapper would not learn of skipped "
    "steps (step_was_skipped), and schedulers would move on: leave the optimizer and its "
    "scheduler out of accelerator.prepare, call (loss * optimizer.scale).backward() and "
    "optimizer.step(), and scheduler.step() if report.changed"
)


def require_no_others(others: dict[str, Any], known: Iterable[str]) -> None:
    """Raise UserError, naming all, for arguments that the optimizer has not, as torch's and others'
    optimizers have.

    known: the names of its own arguments.
    """
    problems: list[str] = []
    for name in others:
        if name in _ELSEWHERE:
            hint = f": {_ELSEWHERE[name].format(name)}"
        else:
            hint = did_you_mean(name, known)
        problems.append(f"ParallelAMPOptimizer has no argument {name}{hint}")
    if problems:
        raise UserError(*problems)


class TorchOptimizerApi(torch.optim.Optimizer):
    """The part of an optimizer that only loops for torch's optimizers look at.

    An optimizer is complete, and no longer in torch's constructor, when it has the attribute
    `buffers`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Raises UserError for one that a complete optimizer would not look
        at."""
        if name in FIXED and hasattr(self, "buffers"):
            raise UserError(
                f"optimizer.{name} is set, but the optimizer keeps what it was built with: "
                + _SETTABLE_ELSEWHERE.get(name, "build a new one")
            )
        super().__setattr__(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, in torch's constructor only. Raise UserError later: the buffers are then
        fixed."""
        if hasattr(self, "buffers"):
            raise UserError.of("optimizer.groups_fixed")
        # Not torch's own method: it imports torch._dynamo, which takes every rank over a second.
        param_group["params"] = list(param_group["params"])
        self.param_groups.append(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raise UserError: only torch.amp.GradScaler reads this attribute."""
        raise UserError(TWO_SCALERS)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Raise UserError: only accelerate's `prepare` reads this attribute."""
        raise UserError(_ACCELERATE)

    @property
    def state(self) -> Any:
        """Raise UserError: the moments of a parameter are not found here."""
        raise UserError.of("optimizer.state_not_readable")

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if hasattr(self, "buffers"):
            raise UserError.of("optimizer.state_not_writable")

    # torch's own method, called by copy and pickle
    def __getstate__(self) -> NoReturn:
        """Raise UserError for a copy or a pickle of the optimizer."""
        raise UserError.of("optimizer.not_copyable", kind=type(self).__name__)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> NoReturn:
        """Raise UserError: no hook is called around the state."""
        _refuse("register_state_dict_pre_hook")

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> NoReturn:
        """Raise UserError: no hook is called around the state."""
        _refuse("register_state_dict_post_hook")

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> NoReturn:
        """Raise UserError: no hook is called around the state."""
        _refuse("register_load_state_dict_pre_hook")

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> NoReturn:
        """Raise UserError: no hook is called around the state."""
        _refuse("register_load_state_dict_post_hook")


def _refuse(name: str) -> NoReturn:
    raise UserError.of("optimizer.state_hook", name=name)
