"""Names in a file that concern precision, each of which must be read, refused or named in a note.

A name counts if one of its words is about precision (fp8, dtype, amax, ...), if one of the five
systems has it as a key, or if it is similar to one of these, as a misspelt key is. Names of
assignments, keywords, dict keys and called functions are examined everywhere.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

from megaprec.dialects import (
    colossalai,
    colossalai_plugins,
    internevo,
    internevo_model,
    nemo,
    nemo_v1,
    nxd,
    smp,
)
from megaprec.dialects.reading import Keys
from megaprec.dialects.scaling import GradScaler
from tools.foreign.expressions import shortened


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


WORDS = _words(
    "fp4 fp8 fp16 fp32 fp64 bf16 tf32 mxfp8 nvfp4 float16 bfloat16 float32 float64 half amp "
    "apex autocast dtype "
    "precision amax hysteresis downcast mixed"
)
PHRASES = _words(
    "loss_scale loss_scaling grad_scaler gradscaler init_scale initial_scale min_scale "
    "max_scale growth_factor "
    "backoff_factor growth_interval master_weight master_param grad_clip clip_grad "
    "gradient_clip max_grad_norm "
    "max_norm stochastic_rounding opt_level keep_batchnorm grad_reduce zero_one "
    "matmul_precision grad_acc_hook "
    "main_grad main_params e4m3 e5m2"
)
GENERIC = _words(
    "mode recipe enabled margin checkpoint parallel tensor pipeline weight zero1 model "
    "optimizer_config plugin "
    "vocab_size hidden_size num_layers num_attention_heads num_kv_attention_heads norm_type "
    "mlp_ratio verbosity "
    "num_chunks reduce_bucket_size use_flash_attn drop_rate no_bias model_type "
    "layer_norm_epsilon tp_size pp_size "
    "zero_stage stage norm_type kind interval environment optim_name cast_inputs v1 "
    "sequence_parallel verbose"
)
"""Keys of the systems that mean other things elsewhere: they count only inside of the systems' own tables."""
MAKING_TENSORS = (
    "torch.tensor",
    "torch.zeros",
    "torch.ones",
    "torch.empty",
    "torch.full",
    "torch.arange",
    "torch.rand",
)
OTHER_NUMBERS = (
    "np.",
    "numpy.",
    "pd.",
    "pandas.",
    "torch.int",
    "torch.uint",
    "torch.long",
    "torch.bool",
    "jnp.",
    "tf.",
)
FP32 = ("torch.float", "torch.float32")
LONGEST_NAME = 60
HIDING = ("exec", "eval", "globals", "locals")  # calls behind which anything may be set
PRECISE = _words(
    "dtype residual_in_fp32 use_fp32_norm output_tf32 output_to_fp32 embed_grad_scale grad_scaler"
)
"""Keys of InternEvo's model that bear on precision; the others are about its shape."""


@dataclass(frozen=True)
class Mention:
    """A name that concerns precision. node: id of its syntax node. text: source text, for
    messages."""

    node: int
    name: str
    line: int
    text: str


def _vocabulary() -> frozenset[str]:
    kinds = [
        kind
        for module in (
            colossalai,
            colossalai_plugins,
            internevo,
            internevo_model,
            nemo,
            nemo_v1,
            nxd,
            smp,
        )
        for kind in vars(module).values()
    ]
    tables = [
        kind for kind in (*kinds, GradScaler) if isinstance(kind, type) and issubclass(kind, Keys)
    ]
    names = (
        {name for table in tables for name in table.model_fields}
        | set(nemo.RECIPES)
        | set(smp.RECIPES)
    )
    shapes = set(internevo_model.Model.model_fields) - PRECISE
    return frozenset(
        name.lower() for name in names - shapes if name not in GENERIC and len(name) > 4
    )


VOCABULARY = _vocabulary() | {
    "mixed_precision_config",
    "neuronx_distributed_config",
    "naiveampmodel",
}
_TRIGRAMS = {name: {name[i : i + 3] for i in range(len(name) - 2)} for name in VOCABULARY}


@lru_cache(maxsize=4096)
def bears_on_precision(name: str) -> bool:
    """Return True if a name is about precision, or similar to one that is."""
    lower = name.lower()
    if len(name) > LONGEST_NAME or lower in GENERIC:
        return False
    words = lower.replace("-", "_").split("_")
    if "overlap" in words:
        return False
    if lower in VOCABULARY or WORDS & set(words) or any(phrase in lower for phrase in PHRASES):
        return True
    return len(name) > 7 and bool(_near(lower))


def _near(name: str) -> list[str]:
    """Return names of the vocabulary that this name may be a misspelling of."""
    parts = {name[i : i + 3] for i in range(len(name) - 2)}
    likely = [
        known for known, trigrams in _TRIGRAMS.items() if 2 * len(parts & trigrams) >= len(trigrams)
    ]
    return get_close_matches(name, likely, n=1, cutoff=0.86)


def mentions_in(tree: ast.Module) -> Iterator[Mention]:
    """Return every mention of precision in a module, in no order."""
    loaded = {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _in_call(node)
        elif isinstance(node, ast.Dict):
            yield from _in_dict(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _in_target(target, node.value, loaded)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            yield from _in_target(node.target, node.value, loaded)


def _in_call(node: ast.Call) -> Iterator[Mention]:
    function = shortened(node.func)
    name = function.rpartition(".")[2]
    idle = name == "set_default_dtype" and shortened(node.args[0]) in FP32 if node.args else False
    if bears_on_precision(name) and not function.startswith(OTHER_NUMBERS) and not idle:
        yield Mention(id(node), name, node.lineno, shortened(node))
    if function.startswith((*MAKING_TENSORS, *OTHER_NUMBERS)):
        return
    if isinstance(node.func, ast.Name) and name in HIDING:
        yield Mention(id(node), name, node.lineno, shortened(node))
    for word in node.keywords:
        if (
            word.arg
            and bears_on_precision(word.arg)
            and not shortened(word.value).startswith(OTHER_NUMBERS)
        ):
            yield Mention(
                id(word),
                word.arg,
                word.lineno,
                f"{word.arg}={shortened(word.value)} of {function}()",
            )
    for item in node.args:  # model.to(torch.bfloat16)
        if name in ("to", "type") and shortened(item).removeprefix("torch.") in WORDS:
            yield Mention(id(node), name, node.lineno, shortened(node))


def _in_dict(node: ast.Dict) -> Iterator[Mention]:
    for key, value in zip(node.keys, node.values, strict=True):
        if (
            isinstance(key, ast.Constant)
            and isinstance(key.value, str)
            and bears_on_precision(key.value)
        ):
            if key.value in WORDS and shortened(value).removeprefix("torch.") in WORDS:
                continue  # a list of dtypes by name, of which one is chosen elsewhere
            yield Mention(id(key), key.value, key.lineno, f'"{key.value}": {shortened(value)}')


def _in_target(target: ast.expr, value: ast.expr, loaded: set[str]) -> Iterator[Mention]:
    """Yield the mention in the target of an assignment; a name that is used later is accounted for
    there."""
    if isinstance(target, ast.Name):
        name = "" if target.id in loaded else target.id
    elif isinstance(target, ast.Attribute):
        name = target.attr
    elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        name = str(target.slice.value)
    else:
        name = ""
    if name and bears_on_precision(name) and not shortened(value).startswith(OTHER_NUMBERS):
        yield Mention(id(target), name, target.lineno, f"{shortened(target)} = {shortened(value)}")
