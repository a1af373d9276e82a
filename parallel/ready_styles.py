"""Styles for models of transformers, whose layers have the same names in many families.

transformers itself is not imported: its modules are known by their names and by what they have.
"""

from fnmatch import fnmatchcase

from torch import nn

from megaprec.errors import UserError
from parallel.plain_modules import Style

STYLES: dict[str, Style] = {
    "*embed_tokens": "vocab",
    "*.q_proj": "column",
    "*.k_proj": "column",
    "*.v_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
    "*.q_norm": "heads",
    "*.k_norm": "heads",
    "lm_head": "column",
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def transformers_styles(model: nn.Module) -> dict[str, Style]:
    """Return the styles by which `parallelize` cuts a causal model of transformers, of the families
    Llama, Mistral, Qwen2 and Qwen3.

    What has no parallel form is changed in place: norms of queries and keys become nn.RMSNorm, and
    an embedding forgets its padding_idx, so that the row of that token is trained as others are.
    Parameters stay the same objects.

    The logits stay cut over tp: `vocab_parallel_loss(model.lm_head)` computes their loss.
    Raises UserError for another family.
    """
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if family not in FAMILIES:
        raise UserError.of("parallel.no_styles", family=family, families=", ".join(FAMILIES))
    for path, module in list(model.named_modules()):
        is_norm_of_heads = path.endswith((".q_norm", ".k_norm"))
        if is_norm_of_heads and not isinstance(module, nn.RMSNorm):
            model.set_submodule(path, _torch_norm(module))
        elif isinstance(module, nn.Embedding):
            module.padding_idx = None
    paths = [path for path, _ in model.named_modules()]
    # `parallelize` refuses patterns that match no layer
    styles: dict[str, Style] = {}
    for pattern, style in STYLES.items():
        if any(fnmatchcase(path, pattern) for path in paths):
            styles[pattern] = style
    return styles


def _torch_norm(norm: nn.Module) -> nn.RMSNorm:
    """Return torch's norm with the weight and epsilon of one of transformers."""
    weight = norm.get_parameter("weight")
    eps = float(norm.variance_epsilon)  # type: ignore[arg-type]
    replaced = nn.RMSNorm(weight.shape, eps, device=weight.device, dtype=weight.dtype)
    replaced.weight = weight
    return replaced
