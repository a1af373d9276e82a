"""Names in a file that concern precision, each of which must be read, refused or named in a note.

A name counts if one of its words is about precision (fp8, dtype, amax, ...), if one of the five
systems has it as a key, or if it is similar to one of these, as a misspelt key is.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

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
from megaprec.dialects.scaling import TorchGradScaler
from tools.interop.foreign.plain import (
    Call,
    DictEntry,
    Fields,
    PlainDict,
    PlainSequence,
    Symbol,
    UnknownValue,
    positional,
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DTYPES = _words(
    "fp4 fp8 fp16 fp32 fp64 bf16 tf32 mxfp8 nvfp4 float16 bfloat16 float32 float64 half"
)
WORDS = DTYPES | _words("amp apex autocast dtype precision amax hysteresis downcast mixed")
PHRASES = _words(
    "loss_scale loss_scaling grad_scaler gradscaler init_scale initial_scale min_scale max_scale "
    "growth_factor backoff_factor growth_interval master_weight master_param grad_clip clip_grad "
    "gradient_clip max_grad_norm max_norm stochastic_rounding opt_level keep_batchnorm "
    "grad_reduce zero_one matmul_precision grad_acc_hook main_grad main_params e4m3 e5m2"
)
# Keys of the systems that mean other things elsewhere: they count only in the systems' tables
GENERIC = _words(
    "mode recipe enabled margin checkpoint parallel tensor pipeline weight zero1 model "
    "optimizer_config plugin vocab_size hidden_size num_layers num_attention_heads "
    "num_kv_attention_heads norm_type mlp_ratio verbosity num_chunks reduce_bucket_size "
    "use_flash_attn drop_rate no_bias model_type layer_norm_epsilon tp_size pp_size zero_stage "
    "stage kind interval environment optim_name cast_inputs v1 sequence_parallel verbose"
)
# Keys of InternEvo's model that bear on precision; the others are about its shape
PRECISE = _words(
    "dtype residual_in_fp32 use_fp32_norm output_tf32 output_to_fp32 embed_grad_scale grad_scaler"
)
MAKING_TENSORS = (
    "torch.tensor",
    "torch.zeros",
    "torch.ones",
    "torch.empty",
    "torch.full",
    "torch.arange",
    "torch.rand",
)
# Beginnings of values that are no floating-point dtype
OTHER_NUMBERS = (
    "np.",
    "numpy.",
    "pd.",
    "pandas.",
    "jnp.",
    "tf.",
    "torch.int",
    "torch.uint",
    "torch.long",
    "torch.bool",
    "lambda",
)
LONGEST_NAME = 60
HIDING = ("exec", "eval", "globals", "locals")  # calls behind which anything may be set
NAMING = ("setattr", "setdefault", "putenv")  # calls that set what they are told the name of
DIALECTS = (
    colossalai,
    colossalai_plugins,
    internevo,
    internevo_model,
    nemo,
    nemo_v1,
    nxd,
    smp,
)


@dataclass(frozen=True)
class Mention:
    """A name that concerns precision.

    node: id of its syntax node, or the number of its key. text: source text, for messages. value:
    what it stands for.
    """

    node: int
    line: int
    text: str
    value: Any = None


def _vocabulary() -> frozenset[str]:
    """Return the keys of the five systems' dialects, in small letters, without those that mean
    other things elsewhere."""
    kinds: list[object] = [TorchGradScaler]
    for module in DIALECTS:
        kinds += vars(module).values()
    names = {"mixed_precision_config", "neuronx_distributed_config", "naiveampmodel"}
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Keys):
            names |= set(kind.model_fields)
    names |= set(nemo.RECIPES) | set(smp.RECIPES)
    names -= set(internevo_model.Model.model_fields) - PRECISE
    return frozenset(name.lower() for name in names if name not in GENERIC and len(name) > 4)


VOCABULARY = _vocabulary()


def _trigrams(name: str) -> set[str]:
    """Return all three neighbouring letters of a name."""
    return {name[i : i + 3] for i in range(len(name) - 2)}


_TRIGRAMS = {name: _trigrams(name) for name in VOCABULARY}


@lru_cache(maxsize=4096)
def bears_on_precision(name: str) -> bool:
    """Return True if a name is about precision, or similar to one that is."""
    lower = name.lower()
    words = lower.replace("-", "_").split("_")
    if len(name) > LONGEST_NAME or lower in GENERIC or "overlap" in words:
        return False
    if lower in VOCABULARY or WORDS & set(words) or any(phrase in lower for phrase in PHRASES):
        return True
    return len(name) > 7 and _may_be_misspelt(lower)


def _may_be_misspelt(name: str) -> bool:
    """Return True for a name that is similar to one of the vocabulary."""
    trigrams = _trigrams(name)
    # The comparison is slow, so it is made with words alone that share half of their trigrams.
    candidates = [word for word, own in _TRIGRAMS.items() if 2 * len(trigrams & own) >= len(own)]
    return bool(get_close_matches(name, candidates, n=1, cutoff=0.86))


def shortened(node: ast.AST, longest: int = 100) -> str:
    """Return an expression as text, truncated if it is long."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def mentions_of(
    made: Iterable[Fields], loose: Iterable[tuple[str, DictEntry]]
) -> Iterator[Mention]:
    """Return every mention of precision in the dicts and calls of a file, and in what else it sets
    by name."""
    pairs = [*loose]
    for fields in made:
        if isinstance(fields, Call) and _call_bears_on_precision(fields):
            yield Mention(fields.node, fields.line, fields.text)
        if not _is_of_other_numbers(fields):
            pairs += fields.entries.items()
    for name, entry in pairs:
        text = shown(entry.value)
        is_set = entry.node != 0 and entry.value is not None
        if is_set and bears_on_precision(name) and not text.startswith(OTHER_NUMBERS):
            yield Mention(entry.node, entry.line, f"{name} = {text}", entry.value)


def _is_of_other_numbers(fields: Fields) -> bool:
    others = (*MAKING_TENSORS, *OTHER_NUMBERS)
    return isinstance(fields, Call) and fields.function.name.startswith(others)


def _call_bears_on_precision(call: Call) -> bool:
    """Return True for a call that may set a precision: of a function that is about it, of a cast to
    one of the dtypes, and of what may set anything."""
    function = call.function
    arguments = [shown(entry.value).removeprefix("torch.") for entry in positional(call)]
    if function.last in ("to", "type"):
        # model.to(torch.bfloat16)
        return not DTYPES.isdisjoint(arguments)
    if function.last in NAMING:
        return any(map(bears_on_precision, arguments))
    is_other = function.name.startswith(OTHER_NUMBERS)
    return function.name in HIDING or (bears_on_precision(function.last) and not is_other)


def shown(value: object) -> str:
    """Return a value as text for a message."""
    match value:
        case PlainDict():
            return "{...}"
        case PlainSequence():
            return "[...]"
        case Call() | UnknownValue():
            return value.text
        case Symbol():
            return value.name
        case ast.AST():
            return "lambda"  # or a function
    return str(value)
