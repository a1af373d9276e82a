"""muP of Megatron-LM's arguments (`--use-mup`), as [model] and [optimizer] of a run file.

Sources: `TransformerConfig.__post_init__` and `get_mup_config_overrides` of Megatron-LM. With
m = hidden_size / mup_base_hidden_size it has, as here, hidden matrices that begin smaller by
sqrt(m) and have learning rates that are smaller by m, and logits that are multiplied by 1 / m. It
differs in two numbers. It leaves weight decay alone, so that a step takes less of a wider matrix;
`optimizer.groups` say so. And it divides epsilon for hidden matrices only, which a note says.
"""

import re

from models.config import ModelConfig
from models.logical_shapes import logical_shapes
from models.mup import READOUTS
from tools.interop.arguments.megatron import option
from tools.interop.importing.arguments import Arguments

TABLES = ("embedding.weight", "positions.weight")
"""Names of the matrices whose rows are looked up."""


def add_mup(arguments: Arguments, model: ModelConfig) -> None:
    """Add the keys of muP, if the arguments ask for it. model: the one that they describe."""
    if not arguments.get("use_mup"):
        return
    base = arguments.get("mup_base_hidden_size") or model.hidden
    arguments.put("model.mup_base_hidden", base, "use_mup", "mup_base_hidden_size")
    _add_head_dim(arguments, model)
    if arguments.has("embedding_init_method_std") and not model.tied:
        # Megatron's head begins as its embedding does.
        std = arguments.get("embedding_init_method_std")
        init = {"embedding": std, "head": std}
        arguments.put("model.init", init, "embedding_init_method_std")
    if base == model.hidden:
        return
    if model.experts:
        why = "routers begin smaller by the width here, in Megatron-LM by its root (docs/mup.md)"
        arguments.refuse(why, "use_mup", "num_experts")
    if arguments.get("optimizer") != "adam":
        why = "muP is read of --optimizer adam; SGD scales otherwise (docs/mup.md)"
        arguments.refuse(why, "use_mup", "optimizer")
    growth = model.hidden / base
    _add_decay(arguments, model, growth)
    arguments.draft.notes.append(
        f"--use-mup: {option('adam_eps')} is divided by {growth:g} for all parameters, in "
        "Megatron-LM only for hidden matrices"
    )


def _add_head_dim(arguments: Arguments, model: ModelConfig) -> None:
    """Add the width of a base head, from which the scale of scores follows."""
    names = ("use_mup", "mup_base_head_dim", "mup_attn_scale_power")
    power = arguments.get("mup_attn_scale_power")
    base_head_dim = arguments.get("mup_base_head_dim")
    # Latent attention has a scale of its own there, without muP.
    if model.latent or (power == 0.5 and base_head_dim is None):
        return
    # Without a base head the scale is 1 / head_dim.
    base_head_dim = 1 if base_head_dim is None else base_head_dim
    if power != 1 or base_head_dim < 1 or base_head_dim != int(base_head_dim):
        why = "scores are multiplied by sqrt(base) / head_dim, of a whole number base, or 1 / "
        why += "sqrt(head_dim): give --mup-attn-scale-power 1 or, without a base, 0.5"
        arguments.refuse(why, *names[1:])
        return
    arguments.put("model.mup_base_head_dim", int(base_head_dim), *names)


def _add_decay(arguments: Arguments, model: ModelConfig, growth: float) -> None:
    """Add groups by which hidden matrices decay as in Megatron-LM. growth: m of the module's
    docstring, by which muP multiplies their decay here; the factor of a group undoes that."""
    if not arguments.get("weight_decay"):
        return
    patterns: dict[str, None] = {}
    for name, shape in logical_shapes(model).items():
        is_hidden = len(shape) == 2 and name not in TABLES and not name.endswith(READOUTS)
        if is_hidden:
            patterns[re.sub(r"\.\d+\.", ".*.", name)] = None
    groups = [{"pattern": pattern, "weight_decay": 1 / growth} for pattern in patterns]
    arguments.put("optimizer.groups", groups, "use_mup", "weight_decay")
