"""Attributes of torch's optimizers that this project's has not, or has elsewhere, and that say so.

torch keeps moments in `state`, copies and pickles an optimizer, and calls hooks around its state.
Here moments lie in flat buffers that share memory with the model. An empty `state`, a copy without
buffers or a hook that is never called would be a silent loss.
"""

from typing import Any, NoReturn

import torch

from megaprec.errors import UserError

# Arguments that an optimizer is built with and does not look up again: its buffers and groups are
# made for them.
FIXED = [
    "parts",
    "plan",
    "mesh",
    "lr",
    "average",
    "virtual",
    "experts",
    "rule",
    "weight_decay",
    "groups",
    "norm",
    "zero_size",
    "shard_gradients",
    "shard_weights",
    "keep_layers",
    "keep_bytes",
    "overlap",
    "bucket",
    "seed",
    "canonical",
    "leaves",
    "ema",
    "offload",
    # torch's, which the rule has here
    "betas",
    "eps",
    "momentum",
    "nesterov",
]
_SETTABLE_ELSEWHERE = {
    "lr": "use optimizer.step(lr=...) or param_groups, whichever has it",
    "weight_decay": "use optimizer.param_groups",
}


class TorchOptimizerApi(torch.optim.Optimizer):
    """The part of an optimizer that only loops for torch's optimizers look at.

    An optimizer is complete, and no longer in torch's constructor, when it has the attribute
    `buffers`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Raises UserError for one that a complete optimizer would not look
        at."""
        if name in FIXED and hasattr(self, "buffers"):
            instead = _SETTABLE_ELSEWHERE.get(name, "build a new one")
            raise UserError.of("optimizer.fixed_setting", name=name, instead=instead)
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
        raise UserError.of("optimizer.two_scalers")

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Raise UserError: only accelerate's `prepare` reads this attribute."""
        raise UserError.of("optimizer.accelerate_prepare")

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
