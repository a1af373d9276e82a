"""The model of Megatron-LM's arguments: [model] of a run file.

What the arguments mean together is known in one place, `tools.convert.megatron.args`,
which reads the same arguments from a checkpoint. Here they are completed as Megatron-LM's
`validate_args` does before it saves them.
"""

import ast
import re
from collections.abc import Sequence
from typing import Any

from megaprec.errors import Problem, UserError
from models.config import ModelConfig
from tools.convert.megatron.args import model_of_args
from tools.convert.megatron.hybrid_layers import (
    DELTA_ARGUMENTS,
    MAMBA_ARGUMENTS,
    PATTERNS,
    STAGE_END,
)
from tools.convert.megatron.keys import READ_ARGUMENTS as IN_CHECKPOINTS
from tools.interop.arguments.megatron import DEFAULTS, READ, option
from tools.interop.importing.arguments import Arguments
from tools.interop.importing.draft import Draft
from tools.interop.importing.megatron_mup import add_mup

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
OF_MODEL = [row for row in READ.values() if row.keys[0].startswith("model.")]
OF_FAMILY = (
    "num_experts",
    "multi_latent_attention",
    "moe_router_score_function",
    "softmax_type",
    "position_embedding_type",
    "use_rotary_position_embeddings",
    *PATTERNS,
    "experimental_attention_variant",
)
FREQUENCIES = (
    "no_rope_freq",
    "moe_layer_freq",
    "window_attn_skip_freq",
    "linear_attention_freq",
)
PAIR = re.compile(r"\s*(-?\d{1,9})\s*,\s*(-?\d{1,9})\s*")
PATTERN = re.compile(r"[\s,\d\[\]()+*]{1,500}")
LONGEST = 10_000
BALANCED = {"aux_loss": "each micro-batch", "global_aux_loss": "the global batch"}
NO_NAMES = 10**6  # a vocabulary for `model_of`, where only the tokenizer knows it


def add_model(arguments: Arguments) -> None:
    """Add the keys of [model]."""
    draft = arguments.draft
    is_settled = "model.preset" in draft.settled or "train.init_from" in draft.settled
    if is_settled and not any(arguments.has(name) for name in REQUIRED):
        return
    missing = _missing(arguments)
    for name in missing:
        draft.missing.append(f"{option(name)} is missing, which Megatron-LM needs")
    if missing:
        return
    try:
        args = completed(arguments)
        vocab = args["vocab_size"] or args["padded_vocab_size"]
        # muP, which no checkpoint may have, is added below
        model = model_of_args({**args, "use_mup": None}, vocab or NO_NAMES)
    except UserError as error:
        draft.problems += [_as_typed(problem, arguments) for problem in error.problems]
        return
    for key, value in _stated(model, arguments).items():
        arguments.put(f"model.{key}", value, *_names_of(key))
    _add_training_only(arguments, model)
    add_mup(arguments, model)
    _note_balance(args["moe_router_load_balancing_type"], model, draft)
    _note_idle_sizes(arguments, model)


def _missing(arguments: Arguments) -> list[str]:
    """Return the arguments that Megatron-LM needs and that are not given."""
    missing = [name for name in REQUIRED if not arguments.has(name)]
    # The letters of a hybrid model's layers are their number.
    if _layers_by_pattern(arguments) and "num_layers" in missing:
        missing.remove("num_layers")
    return missing


def _layers_by_pattern(arguments: Arguments) -> int:
    """Return the number of layers of a hybrid model's pattern; 0 if none is given."""
    patterns = [arguments.get(name) for name in PATTERNS]
    pattern = next(filter(None, patterns), "")
    return len(pattern.replace(STAGE_END, ""))


def _note_idle_sizes(arguments: Arguments, model: ModelConfig) -> None:
    """Add notes on arguments of parts that the model lacks."""
    _note_idle(arguments, MAMBA_ARGUMENTS, "a Mamba-2 mixer", bool(model.mamba))
    _note_idle(arguments, DELTA_ARGUMENTS, "a gated delta net", bool(model.delta_net))
    if model.hybrid_pattern:
        has_attention = "*" in model.hybrid_pattern
        _note_idle(arguments, ("attention_dropout",), "attention", has_attention)


def _note_idle(arguments: Arguments, names: Sequence[str], what: str, is_there: bool) -> None:
    """Add a note on sizes that are given of what no layer has."""
    given = [name for name in names if arguments.has(name)]
    if given and not is_there:
        said = arguments.origin(*given)
        arguments.draft.notes.append(f"{said}: no layer has {what}, so this changes nothing")


def _note_balance(kind: str, model: ModelConfig, draft: Draft) -> None:
    """Note that a router's loss is over other tokens here. kind: of load balancing."""
    if model.experts and model.router_aux_loss and kind in BALANCED:
        draft.notes.append(
            f"--moe-router-load-balancing-type {kind}: model.router_aux_loss balances each "
            f"sample, as seq_aux_loss does, not {BALANCED[kind]}"
        )


def _add_training_only(arguments: Arguments, model: ModelConfig) -> None:
    """Add keys of [model] that a checkpoint says nothing of."""
    init = dict[str, Any]()
    if arguments.has("embedding_init_method_std"):
        init["embedding"] = arguments.get("embedding_init_method_std")
    if arguments.get("no_scaled_init"):
        init["shrink"] = "none"
    if init:
        arguments.put("model.init", init, "embedding_init_method_std", "no_scaled_init")
    if not model.mtp_layers and arguments.has("mtp_loss_scaling_factor"):
        arguments.copy("model.mtp_loss_weight", "mtp_loss_scaling_factor")


def completed(arguments: Arguments) -> dict[str, Any]:
    """Return the model's arguments as Megatron-LM has them after its checks. Raises UserError."""
    args = {name: DEFAULTS[name] for name in IN_CHECKPOINTS & DEFAULTS.keys()}
    args |= {row.kept: arguments.get(row.kept) for row in OF_MODEL}
    if arguments.get("attention_head_type") == "multiquery":
        args |= {"group_query_attention": True, "num_query_groups": 1}
    args["num_layers"] = args["num_layers"] or _layers_by_pattern(arguments)
    heads = args["num_attention_heads"]
    if args["kv_channels"] is None and args["hidden_size"] % heads:
        said = arguments.origin("hidden_size")
        raise UserError.of("import.heads_multiple", said=said, heads=heads)
    if args["ffn_hidden_size"] is None:
        args["ffn_hidden_size"] = _usual_width(args["hidden_size"], args["swiglu"])
    args["num_experts"] = args["num_experts"] or None
    args["window_size"] = _pair(args["window_size"])
    for name in FREQUENCIES:
        args[name] = _frequency(name, args[name])
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        args[name] = _only(name, args[name])
    return args


def _usual_width(hidden: int, is_gated: bool) -> int:
    """Return Megatron-LM's width of a feed-forward; a gated one is rounded down to a multiple of
    64."""
    if not is_gated:
        return 4 * hidden
    width = 4 * hidden * 2 / 3
    return int(width / 64) * 64


def _only(name: str, values: tuple[Any, ...]) -> Any:
    """Return the one value of an argument that may have several."""
    if len(values) != 1:
        shown = " ".join(map(str, values))
        raise UserError.of("import.one_loss_value", option=option(name), values=shown)
    return values[0]


def _pair(text: str | None) -> tuple[int, ...] | None:
    """Return the two numbers of --window-size; None if it is not given. Raises UserError."""
    if text is None:
        return None
    pair = PAIR.fullmatch(text.strip("()[] "))
    if pair is None:
        raise UserError.of("import.window_size", text=text)
    return tuple(map(int, pair.groups()))


def _frequency(name: str, text: str | None) -> Any:
    """Return a whole number, or the list that a pattern such as "([0]*3+[1])*2" stands for."""
    if text is None:
        return None
    try:
        if re.fullmatch(r"\d{1,9}", text):
            return int(text)
        if PATTERN.fullmatch(text):
            tree = ast.parse(text.strip(), mode="eval")
            values = _evaluated(tree.body)
            if all(isinstance(value, int) for value in values):
                return values
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        pass
    raise UserError.of("import.frequency", option=option(name), text=text)


def _evaluated(node: ast.expr) -> Any:
    """Return the value of sums and multiples of lists. Raises ValueError or TypeError for any other
    expression."""
    match node:
        case ast.Constant(int(value)) if value < LONGEST:
            return value
        case ast.List(items):
            return [_evaluated(item) for item in items]
        case ast.BinOp(left, ast.Add(), right):
            return _evaluated(left) + _evaluated(right)
        case ast.BinOp(left, ast.Mult(), right):
            base = _evaluated(left)
            times = _evaluated(right)
            if len(base) * times <= LONGEST:
                return base * times
    raise ValueError


def _stated(model: ModelConfig, arguments: Arguments) -> dict[str, Any]:
    """Return the fields that a run file has to state: those given, and those that differ from our
    defaults."""
    chosen = model.model_dump(include=model.model_fields_set)
    if not arguments.has("vocab_size") and not arguments.has("padded_vocab_size"):
        chosen.pop("vocab")
    stated = dict[str, Any]()
    for key, value in chosen.items():
        # No argument gives the family: it follows from several.
        is_given = key != "family" and any(map(arguments.has, _names_of(key)))
        is_required = ModelConfig.model_fields[key].is_required()
        if is_given or is_required or _follows(stated, key) != value:
            stated[key] = value
    return stated


def _follows(stated: dict[str, Any], key: str) -> Any:
    """Return the value that a key has if it is not given, after the keys before it."""
    known = {"layers": 1, "hidden": 64, "heads": 1} | stated
    known.pop("init", None)
    try:
        return ModelConfig.model_validate(known).model_dump()[key]
    except ValueError:
        return None


def _names_of(key: str) -> list[str]:
    """Return the arguments that a field comes from."""
    if key == "family":
        return [*OF_FAMILY]
    names = [row.kept for row in OF_MODEL if f"model.{key}" in row.keys]
    return list(dict.fromkeys(names))


def _as_typed(problem: Problem, arguments: Arguments) -> str:
    """Return a problem that names arguments as Megatron's checkpoints do (num_layers), with the
    names that are typed instead (--num-layers). A field of the model is named by its key in a run
    file, after the arguments that it comes from."""
    if problem.code == "convert.model_field":
        key, _, _ = problem.fields["field"].partition(".")
        given = [name for name in _names_of(key) if arguments.has(name)]
        if given:
            problem = problem.within(f"{arguments.origin(*given)}: ")
        return problem.replace("Megatron's args: ", "model.")
    if said := _said_of_fields(problem, arguments):
        return problem.replace("Megatron's args: ", f"{said}: ")
    name = re.search(r"(?<=Megatron's )\w+(?= = )", problem)
    return problem.replace(f"Megatron's {name[0]}", option(name[0])) if name else problem


def _said_of_fields(problem: Problem, arguments: Arguments) -> str:
    """Return how the arguments are given that the fields of a problem come from, those that are not
    given by their names; "" if none is given."""
    said = list[str]()
    for field in problem.fields:
        names = _names_of(field)
        given = [name for name in names if arguments.has(name)]
        said += [arguments.said.get(name, option(name)) for name in given or names[:1]]
    is_given = any(words in arguments.said.values() for words in said)
    return " ".join(dict.fromkeys(said)) if is_given else ""
