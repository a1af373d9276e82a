"""Changes to a configuration file that keep its meaning, change it in a known way, or leave it
open.

Each takes the text of a file and a random number generator and returns the changed text and what
must come of it: "same" (the plan as before), "kept" (the plan as before, refused or noted), "named" (refused, or
a note that was not there before) or None where it does not apply.
"""

import ast
import random
import re
from collections.abc import Callable

Mutant = tuple[str, str]
KEYS = frozenset(
    {
        "param_dtype",
        "reduce_dtype",
        "buffer_dtype",
        "params_dtype",
        "pipeline_dtype",
        "dtype",
        "precision",
        "opt_level",
    }
    | {
        "use_master_weights",
        "use_fp32_grad_acc",
        "zero_one_enabled",
        "grad_reduce_in_fp32",
        "clip_grad_norm",
    }
    | {
        "fp8_margin",
        "amax_history_len",
        "fp8_format",
        "fp8_recipe",
        "initial_scale",
        "init_scale",
        "hysteresis",
    }
    | {"growth_interval", "max_loss_scale", "loss_scale"}
)


def _assignments(tree: ast.Module) -> list[ast.Assign]:
    """Plain assignments at the top of the module to names that stand only for what is assigned."""
    found = [node for node in tree.body if isinstance(node, ast.Assign)]
    return [
        node for node in found if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    ]


def moved_into_function(tree: ast.Module, rng: random.Random) -> Mutant | None:
    """The whole file as the body of a function that is called, as a script's main is."""
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    body = [node for node in tree.body if node not in imports]
    if not body or any(
        isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in imports
    ):
        return None
    text = "\n".join(ast.unparse(node) for node in body)
    inner = "\n".join(f"    {line}" for line in text.split("\n"))
    head = "\n".join(ast.unparse(node) for node in imports)
    return f'{head}\n\n\ndef main():\n{inner}\n\n\nif __name__ == "__main__":\n    main()\n', "same"


def through_a_name(tree: ast.Module, rng: random.Random) -> Mutant | None:
    """The value of a keyword is assigned to a name first."""
    words = [word for node in tree.body for word in _keywords(node) if word.arg in KEYS]
    literal = [
        word
        for word in words
        if ast.unparse(word.value).startswith(("torch.", '"', "'", *"0123456789"))
    ]
    if not literal:
        return None
    word = rng.choice(literal)
    value = ast.unparse(word.value)
    word.value = ast.Name("chosen_elsewhere")
    first = next(
        i for i, node in enumerate(tree.body) if not isinstance(node, ast.ImportFrom | ast.Import)
    )
    lines = [ast.unparse(node) for node in tree.body]
    return "\n".join([*lines[:first], f"chosen_elsewhere = {value}", *lines[first:]]), "same"


def under_a_constant(tree: ast.Module, rng: random.Random) -> Mutant | None:
    """A value by a condition that is known."""
    found = _assignments(tree)
    if not found:
        return None
    node = rng.choice(found)
    node.value = ast.IfExp(ast.Name("TAKE_THIS"), node.value, ast.Constant(None))
    return f"TAKE_THIS = not False\n{ast.unparse(tree)}", "kept"


def renamed(tree: ast.Module, rng: random.Random) -> Mutant | None:
    """An imported name under an alias."""
    names = [
        (node, alias)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    plain = [(node, alias) for node, alias in names if alias.asname is None and alias.name != "*"]
    if not plain:
        return None
    _, alias = rng.choice(plain)
    old = alias.name
    alias.asname = f"{alias.name}_by_another_name"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == old:
            node.id = alias.asname
    return ast.unparse(tree), "same"


def spread(tree: ast.Module, rng: random.Random) -> Mutant | None:
    """The keywords of a call by ** of a dict."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _named(node) and node.keywords
    ]
    calls = [node for node in calls if all(word.arg for word in node.keywords)]
    if not calls:
        return None
    call = rng.choice(calls)
    pairs = {ast.Constant(word.arg): word.value for word in call.keywords}
    call.keywords = [ast.keyword(None, ast.Dict(list(pairs), list(pairs.values())))]
    return ast.unparse(tree), "same"


def conditional(tree: ast.Module, rng: random.Random) -> Mutant | None:
    """A value of a precision key by a condition that is not known."""
    words = [word for node in tree.body for word in _keywords(node) if word.arg in KEYS]
    if not words:
        return None
    word = rng.choice(words)
    other = ast.Constant(
        64 if isinstance(word.value, ast.Constant) and word.value.value != 64 else 63
    )
    word.value = ast.IfExp(
        ast.parse("open('x').read() == 'y'", mode="eval").body, word.value, other
    )
    return ast.unparse(tree), "named"


def from_outside(tree: ast.Module, rng: random.Random) -> Mutant | None:
    """A value of a precision key from the command line."""
    words = [word for node in tree.body for word in _keywords(node) if word.arg in KEYS]
    if not words:
        return None
    rng.choice(words).value = ast.parse("cli_arguments.value", mode="eval").body
    return ast.unparse(tree), "named"


def misspelt(tree: ast.Module, rng: random.Random) -> Mutant | None:
    """A precision key with two letters exchanged."""
    words = [
        word
        for node in tree.body
        for word in _keywords(node)
        if word.arg in KEYS and len(word.arg or "") > 7
    ]
    if not words:
        return None
    word = rng.choice(words)
    name = str(word.arg)
    places = [
        i for i in range(1, len(name) - 2) if name[i] != name[i + 1] and "_" not in name[i : i + 2]
    ]
    i = rng.choice(places)
    word.arg = name[:i] + name[i + 1] + name[i] + name[i + 2 :]
    return ast.unparse(tree), "named"


def overridden(tree: ast.Module, rng: random.Random) -> Mutant | None:
    """A field that the system does not have is assigned to an object of it."""
    found = [
        node
        for node in _assignments(tree)
        if isinstance(node.value, ast.Call) and _named(node.value)
    ]
    if not found:
        return None
    name = ast.unparse(rng.choice(found).targets[0])
    return f"{ast.unparse(tree)}\n{name}.fp8_margim = 3\n", "named"


def with_noise(tree: ast.Module, rng: random.Random) -> Mutant | None:
    """Settings that say nothing of precision."""
    lines = [
        "learning_rate = 3e-4",
        "save_folder = '/results'",
        "num_workers = 4",
        "names = [i for i in range(3)]",
    ]
    return "\n".join([ast.unparse(tree), *rng.sample(lines, 3)]), "same"


def _keywords(node: ast.AST) -> list[ast.keyword]:
    calls = [
        inner
        for inner in ast.walk(node)
        if isinstance(inner, ast.Call) and (_named(inner) or _is_dict(inner))
    ]
    return [word for call in calls for word in call.keywords]


def _is_dict(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "dict"


def _named(call: ast.Call) -> bool:
    """Whether a call is of one of the systems' classes or functions."""
    last = ast.unparse(call.func).rpartition(".")[2]
    known = "MixedPrecision|MixedPrecisionPolicy|ShardedGradScaler|DelayedScaling|MegatronMixedPrecision"
    known += (
        "|MixedPrecisionConfig|HybridParallelPlugin|LowLevelZeroPlugin|GeminiPlugin|fp8_autocast"
    )
    return re.fullmatch(known, last) is not None


MUTATIONS: tuple[Callable[[ast.Module, random.Random], Mutant | None], ...] = (
    moved_into_function,
    through_a_name,
    under_a_constant,
    renamed,
    spread,
    conditional,
    from_outside,
    misspelt,
    overridden,
    with_noise,
)
