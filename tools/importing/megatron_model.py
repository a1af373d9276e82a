"""The model of Megatron-LM's arguments: [model] of a run file.

What the arguments mean together is known in one place, `tools.convert.megatron.layout.model_of`,
which reads the same arguments from a checkpoint. Here they are completed as Megatron-LM's
`validate_args` does before it saves them.
"""

import ast
import re
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.arguments.forms import option
from tools.arguments.megatron import DEFAULTS, READ
from tools.convert.megatron.args import model_of_args
from tools.convert.megatron.keys import READ_ARGUMENTS as IN_CHECKPOINTS
from tools.importing.draft import Draft
from tools.importing.grammar import Arguments

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
OF_MODEL = frozenset(
    name
    for row in READ.values()
    if row.keys and row.keys[0].startswith("model.")
    for name in [row.sets]
)
PATTERN = re.compile(r"[\s,\d\[\]()+*]{1,500}")
LONGEST = 10_000
BALANCED = {"aux_loss": "each micro-batch", "global_aux_loss": "the global batch"}
NO_NAMES = 10**6  # a vocabulary for `model_of`, where only the tokenizer knows it


def add_model(arguments: Arguments, draft: Draft) -> None:
    """Add the keys of [model]."""
    missing = [name for name in REQUIRED if not arguments.has(name)]
    if missing == list(REQUIRED) and any(
        key in draft.settled for key in ("model.preset", "train.init_from")
    ):
        return
    for name in missing:
        if name not in arguments.tried:
            draft.missing.append(f"{option(name)} is missing, which Megatron-LM needs")
    if missing:
        return
    try:
        args = completed(arguments)
        model = model_of_args(args, args["vocab_size"] or args["padded_vocab_size"] or NO_NAMES)
    except UserError as error:
        draft.problems += [_as_typed(problem) for problem in error.problems]
        return
    for key, value in _stated(model, arguments).items():
        draft.put(f"model.{key}", value, _origin(key, arguments))
    if (std := arguments.get("embedding_init_method_std")) is not None:
        draft.put("model.init", {"embedding": std}, arguments.origin("embedding_init_method_std"))
    if not model.mtp_layers and arguments.has("mtp_loss_scaling_factor"):
        weight = arguments.get("mtp_loss_scaling_factor")
        draft.put("model.mtp_loss_weight", weight, arguments.origin("mtp_loss_scaling_factor"))
    kind = args["moe_router_load_balancing_type"]
    if model.experts and model.router_aux_loss and kind in BALANCED:
        draft.notes.append(
            f"--moe-router-load-balancing-type {kind}: model.router_aux_loss balances each "
            "sample, as seq_aux_loss "
            f"does, not {BALANCED[kind]}"
        )


def completed(arguments: Arguments) -> dict[str, Any]:
    """Return the model's arguments as Megatron-LM has them after its checks. Raises UserError."""
    args = {name: arguments.get(name) for name in OF_MODEL}
    args |= {
        name: DEFAULTS[name]
        for name in IN_CHECKPOINTS.split()
        if name in DEFAULTS and name not in args
    }
    for name in (*REQUIRED, "kv_channels", "ffn_hidden_size", "num_query_groups"):
        if args[name] is not None and args[name] < 1:
            raise UserError.of("import.number_from_one", origin=arguments.origin(name))
    heads = args["num_attention_heads"]
    if args["kv_channels"] is None and args["hidden_size"] % heads:
        said = arguments.origin("hidden_size")
        raise UserError.of("import.heads_multiple", said=said, heads=heads)
    if args["ffn_hidden_size"] is None:
        hidden = args["hidden_size"]
        if args["swiglu"]:
            args["ffn_hidden_size"] = int((4 * hidden * 2 / 3) / 64) * 64
        else:
            args["ffn_hidden_size"] = 4 * hidden
    args["num_experts"] = args["num_experts"] or None
    args["window_size"] = _pair(args["window_size"])
    for name in ("no_rope_freq", "moe_layer_freq", "window_attn_skip_freq"):
        args[name] = _frequency(name, args[name])
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        values = args[name]
        if len(values) != 1:
            raise UserError.of(
                "import.one_loss_value", option=option(name), map=" ".join(map(str, values))
            )
        args[name] = values[0]
    return args


def _pair(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    numbers = text.strip("() ").split(",")
    if len(numbers) != 2 or not all(re.fullmatch(r"\s*-?\d{1,9}\s*", number) for number in numbers):
        raise UserError.of("import.window_size", text=text)
    return tuple(map(int, numbers))


def _frequency(name: str, text: str | int | None) -> Any:
    """Return a whole number, or the list that a pattern such as "([0]*3+[1])*2" stands for."""
    if text is None or isinstance(text, int):
        return text
    try:
        if re.fullmatch(r"\d{1,9}", text):
            return int(text)
        if PATTERN.fullmatch(text):
            return _list(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    raise UserError.of("import.frequency", option=option(name), text=text)


def _list(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List):
        return [_number(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        made = _list(node.left) + _list(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        times = _number(node.right)
        base = _list(node.left)
        if times * len(base) > LONGEST:
            raise ValueError
        made = base * times
    else:
        raise ValueError
    return made


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < LONGEST:
        return node.value
    raise ValueError


def _stated(model: ModelConfig, arguments: Arguments) -> dict[str, Any]:
    """Return the fields that a run file has to state: those given, and those that differ from our
    defaults."""
    chosen = {
        key: value for key, value in model.model_dump().items() if key in model.model_fields_set
    }
    if not arguments.has("vocab_size") and not arguments.has("padded_vocab_size"):
        chosen.pop("vocab")
    needed = dict[str, Any]()
    for key, value in chosen.items():
        given = any(f"model.{key}" in row.keys and arguments.has(row.sets) for row in READ.values())
        required = ModelConfig.model_fields[key].is_required()
        if given or required or _follows(needed, key) != value:
            needed[key] = value
    return needed


def _follows(needed: dict[str, Any], key: str) -> Any:
    """Return the value that a key has if it is not given, after the keys before it."""
    known = {"layers": 1, "hidden": 64, "heads": 1} | {
        k: v for k, v in needed.items() if k != "init"
    }
    try:
        return ModelConfig.model_validate(known).model_dump()[key]
    except ValueError:
        return None


def _origin(key: str, arguments: Arguments) -> str:
    names = [row.sets for row in READ.values() if f"model.{key}" in row.keys]
    if key == "family":
        names = [
            "num_experts",
            "multi_latent_attention",
            "moe_router_score_function",
            "softmax_type",
        ]
        names += ["position_embedding_type", "use_rotary_position_embeddings"]
    return arguments.origin(*dict.fromkeys(names))


def _as_typed(problem: str) -> str:
    """Return a problem with Megatron's args by the names that are typed."""
    return re.sub(r"Megatron's (\w+) = ", lambda match: f"{option(match.group(1))} = ", problem)
