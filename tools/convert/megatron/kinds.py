"""The kind of value that each argument of Megatron has, so that none of another kind is taken for
something else.

Python takes the text "False" for true and True for 1. A checkpoint's args are written by many
programs, and one that wrote text where Megatron-LM has a switch or a number would become another
model without a word.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megaprec.errors import Problem, UserError
from megaprec.kinds import is_number
from tools.convert.megatron.keys import ALLOWED_VALUES, LISTS, READ_ARGUMENTS
from tools.interop.arguments.megatron import READ

SWITCH = "True or False"
SIZE = "a whole number from 1 on"
COUNT = "a whole number from 0 on"
NUMBER = "a number"
WORD = "a word"
_OF_COMMAND_LINES = {
    "switch": SWITCH,
    "off": SWITCH,
    "size": SIZE,
    "count": COUNT,
    "int": NUMBER,
    "number": NUMBER,
}
# what a model is read from, of what a command line has, but for texts, whose forms have readers
KINDS: dict[str, str] = {
    row.kept: _OF_COMMAND_LINES[row.kind]
    for row in READ.values()
    if row.kind in _OF_COMMAND_LINES and row.kept in READ_ARGUMENTS - ALLOWED_VALUES.keys()
}
KINDS |= dict.fromkeys(
    (
        "gated_linear_unit",
        "bias_activation_fusion",
        "share_embeddings_and_output_weights",
        "moe_grouped_gemm",
        "fp16",
        "bf16",
    ),
    SWITCH,
)
KINDS |= dict.fromkeys(
    (
        "seq_length",
        "original_max_position_embeddings",
        "data_parallel_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    ),
    SIZE,
)
KINDS |= dict.fromkeys(("consumed_train_samples", "iteration", "num_steps"), COUNT)
KINDS |= dict.fromkeys(("softmax_scale", "beta_fast", "beta_slow"), NUMBER)
KINDS |= dict.fromkeys(
    (
        "optimizer",
        "transformer_impl",
        "tokenizer_type",
        "lr_decay_style",
        "moe_token_dispatcher_type",
        "hybrid_layer_pattern",
        "hybrid_override_pattern",
    ),
    WORD,
)


def require_kinds(args: Mapping[str, Any]) -> None:
    """Raise UserError for each argument whose value is of another kind; None is no value."""
    if problems := [*_wrong_kinds(args)]:
        raise UserError(*problems)


def _wrong_kinds(args: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each argument whose value is of another kind."""
    for key, given in args.items():
        # with `nargs` Megatron-LM keeps one value as a list
        single = key in LISTS and isinstance(given, list | tuple) and len(given) == 1
        value = given[0] if single else given
        if value is not None and key in KINDS and not is_of(KINDS[key], value):
            yield Problem.of(
                "convert.megatron_argument_kind", key=key, value=value, kind=KINDS[key]
            )


def is_of(kind: str, value: Any) -> bool:
    """Return True for a value of a kind of this module."""
    if kind == WORD:
        return isinstance(value, str)
    if kind == SWITCH:
        return isinstance(value, int) and value in (0, 1)
    if kind == NUMBER:
        return is_number(value)
    smallest = 1 if kind == SIZE else 0
    return isinstance(value, int) and not isinstance(value, bool) and value >= smallest
