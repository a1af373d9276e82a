"""Configurations as users of other systems have them: Python, JSON or TOML, read without running anything.

Of Python, assignments are followed as far as they are literals, arithmetic on numbers, `dict(...)` and names assigned
before; calls of the systems' own classes and functions are found wherever they stand. Anything else is passed over,
and a key whose value hangs on it is left out and said to be.
"""

import ast
import json
import operator
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaprec.dialects import nemo, nxd, smp
from megaprec.dialects.reading import UNKNOWN, Keys
from megaprec.dialects.scaling import GradScaler
from megaprec.errors import UserError

CALLS: Mapping[str, tuple[str, str, type[Keys]]] = {
    "MixedPrecision": ("smp", "mixed_precision", smp.MixedPrecision),
    "MixedPrecisionPolicy": ("smp", "mp_policy", smp.MixedPrecisionPolicy),
    "ShardedGradScaler": ("smp", "grad_scaler", GradScaler),
    "fp8_autocast": ("smp", "fp8_autocast", smp.Fp8Autocast),
    "MegatronMixedPrecision": ("nemo", "", nemo.MegatronMixedPrecision),
    **dict.fromkeys(nemo.RECIPES, ("nemo", "", nemo.MegatronMixedPrecision)),
}
"""Functions and classes by name: the dialect and table that their arguments are, and what they take in order."""
TABLES = {
    "mixed_precision_config": ("nxd", ""),
    "optimizer_config": ("nxd", "optimizer_config"),
    "fp16": ("colossalai", "fp16"),
    "model": ("internevo", ""),
    "grad_scaler": ("internevo", "grad_scaler"),
    "hybrid_zero_optimizer": ("internevo", "hybrid_zero_optimizer"),
    "parallel": ("internevo", "parallel"),
    "mixed_precision": ("smp", "mixed_precision"),
    "mp_policy": ("smp", "mp_policy"),
    "fp8_autocast": ("smp", "fp8_autocast"),
}
"""Tables by the name that their system gives them: the dialect and its table."""
MARKS = {"model": {"dtype", "num_attention_heads", "embed_grad_scale"}, "parallel": {"zero1"}}  # one must be in it
BESIDE_MODEL = ("model_type", "use_fp32_norm", "output_tf32")  # what InternEvo's files say of the model outside of it
ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


class _Unknown(Exception):
    """An expression that is no literal."""


@dataclass
class Pasted:
    """tables: by dialect, what was found of its configuration. notes: what was passed over."""

    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, dialect: str, table: str, values: Mapping[str, Any]) -> None:
        """Notes a part of a dialect's configuration. Only InternEvo's is told what is there but not known."""
        values = values if dialect == "internevo" else _known(values)
        config = self.tables.setdefault(dialect, {})
        if table:
            config[table] = values
        else:
            config |= values


def read_pasted(path: Path) -> Pasted:
    """What the file `path` says of precision. Raises UserError if it cannot be read or says nothing of it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: cannot be read ({reason})") from error
    found = Pasted()
    for read in (_from_toml, _from_json, _from_python):
        named = read(text, found)
        if named is not None:
            _recognise(named, found)
            break
    else:
        raise UserError(f"{path}: neither TOML, JSON nor Python")
    if not found.tables:
        known = "mixed_precision_config, MixedPrecision(...), fp16 = dict(mode=...), model = dict(dtype=...)"
        raise UserError(f"{path}: says nothing of precision in any system's words, like {known}, bf16_mixed()")
    _add_zero(found)
    return found


def _add_zero(found: Pasted) -> None:
    """What NxD's defaults hang on has NxD's own default in a file of its own."""
    config = found.tables.get("nxd")
    if config is not None and "optimizer_config" not in config:
        config["optimizer_config"] = {"zero_one_enabled": False}
        found.notes.append("optimizer_config is not in the file: NxD leaves ZeRO-1 off unless told otherwise")


def _from_toml(text: str, found: Pasted) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _from_json(text: str, found: Pasted) -> dict[str, Any] | None:
    try:
        named = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return named if isinstance(named, dict) else None


def _from_python(text: str, found: Pasted) -> dict[str, Any] | None:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    values = _Values(found)
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Dict):
            values.named |= values.dictionary(statement.value)
        values.follow(statement)
    return values.named


class _Values:
    """The values of names at the top of a module, and of the arguments of known calls, as statements are followed."""

    def __init__(self, found: Pasted) -> None:
        self.named: dict[str, Any] = {}
        self.found = found

    def follow(self, statement: ast.stmt) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and (name := _last(node.func)) in CALLS:
                self._note_call(name, node)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in (target for target in targets if isinstance(target, ast.Name)):
                self.named.pop(target.id, None)
                try:
                    self.named[target.id] = self.value(statement.value)
                except _Unknown:
                    continue

    def _note_call(self, name: str, node: ast.Call) -> None:
        dialect, table, kind = CALLS[name]
        order = [key for key in kind.model_fields if key != "recipe"]
        values = dict(zip(order, node.args, strict=False))
        values |= {word.arg: word.value for word in node.keywords if word.arg}
        config = self._literals(values, f"{name}, line {node.lineno}")
        for more in (word.value for word in node.keywords if not word.arg):
            found = self._literals({"": more}, f"{name}, line {node.lineno}")[""]
            config |= found if isinstance(found, Mapping) else {}
        if dialect == "nemo" and name in nemo.RECIPES:
            config["recipe"] = name
        earlier = self.found.tables.get(dialect, {})
        if (table in earlier) or (not table and earlier):
            raise UserError(f"{name}(...), line {node.lineno}: a second one; keep the one that is meant")
        self.found.add(dialect, table, config)

    def _literals(self, values: Mapping[str, ast.expr], where: str) -> dict[str, Any]:
        """The values; one that cannot be known is UNKNOWN, and noted."""
        known: dict[str, Any] = {}
        for key, node in values.items():
            try:
                known[key] = self.value(node)
            except _Unknown:
                self.found.notes.append(f"{where}: {key} = {ast.unparse(node)} is not known from here, so left out")
                known[key] = UNKNOWN
        return known

    def value(self, node: ast.expr) -> Any:
        """The value of an expression that is plain enough. Raises _Unknown."""
        if isinstance(node, ast.Constant) and node.value is not ...:
            return node.value
        if isinstance(node, ast.Name) and node.id in self.named:
            return self.named[node.id]
        if isinstance(node, ast.Attribute) and _is_dotted(node):
            return ast.unparse(node)
        if isinstance(node, ast.Dict):
            return self.dictionary(node)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -_number(self.value(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            return _calculated(ARITHMETIC[type(node.op)], self.value(node.left), self.value(node.right))
        raise _Unknown

    def dictionary(self, node: ast.Dict) -> dict[str, Any]:
        """A dict display; keys that are no text are passed over."""
        named = {k.value: v for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)}
        return self._literals({str(key): value for key, value in named.items()}, f"line {node.lineno}")

    def _called(self, node: ast.Call) -> Any:
        name = _last(node.func)
        words = {word.arg: word.value for word in node.keywords if word.arg}
        if name == "dict" and not node.args:
            return self._literals(words, f"line {node.lineno}")
        if name in smp.RECIPES and not node.args:
            return {"recipe": name} | self._literals(words, f"{name}, line {node.lineno}")
        if isinstance(node.func, ast.Attribute) and _is_dotted(node.func) and not node.args and not node.keywords:
            return ast.unparse(node.func)  # torch.bfloat16(), as one of the systems' own examples has it
        raise _Unknown


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """A table without the keys of which the value is not known."""
    known = {key: value for key, value in values.items() if value is not UNKNOWN}
    return {key: _known(value) if isinstance(value, Mapping) else value for key, value in known.items()}


def _is_dotted(node: ast.expr) -> bool:
    """Whether this is a name, or an attribute of one: torch.bfloat16."""
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_dotted(node.value))


def _last(function: ast.expr) -> str:
    """The last part of a dotted name."""
    return ast.unparse(function).rpartition(".")[2] if _is_dotted(function) else ""


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 2.0**128:
        raise _Unknown
    return value


def _calculated(calculate: Callable[[Any, Any], Any], left: Any, right: Any) -> int | float:
    left, right = _number(left), _number(right)
    if calculate is operator.pow and abs(right) > 1024:
        raise _Unknown
    try:
        return _number(calculate(left, right))
    except (ArithmeticError, ValueError) as error:
        raise _Unknown from error


def _recognise(named: Mapping[str, Any], found: Pasted, inside: bool = False) -> None:
    """Finds the systems' tables among named values, and in dicts among them."""
    for key, value in named.items():
        if not isinstance(value, Mapping):
            continue
        if key == "grad_scaler" and {"mixed_precision", "mp_policy"} & set(named):
            found.add("smp", key, value)
        elif key in TABLES and (key not in MARKS or MARKS[key] & set(value)):
            found.add(*TABLES[key], value)
        elif not inside:
            _recognise(value, found, inside=True)
    flat = {key: value for key, value in named.items() if not isinstance(value, Mapping)}
    if "internevo" in found.tables and (beside := {key: flat[key] for key in BESIDE_MODEL if key in flat}):
        found.add("internevo", "", beside)
    if set(flat) & set(nxd.MixedPrecisionConfig.model_fields):
        found.add("nxd", "", flat)
    elif isinstance(flat.get("plugins"), str):
        found.add("nemo", "", {"recipe": flat["plugins"]})
    elif not inside and {"recipe", "precision"} & set(flat):
        found.add("nemo", "", flat)
