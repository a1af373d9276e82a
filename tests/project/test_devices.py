"""What travels between ranks is made on the device of the ranks: over NCCL no tensor of the CPU
does."""

import ast
from collections.abc import Iterator

import pytest

from tests.project.test_readme import ROOT

ROOMS = ("megaprec", "parallel", "models", "tools")
TRAVELS = {
    "sum_",
    "max_",
    "gather",
    "scatter_sum",
    "exchange",
    "start_sum_",
    "start_gather",
    "start_scatter_sum",
    "start_exchange",
    "start_shift",
    "all_reduce",
    "broadcast",
    "send",
    "recv",
}
MAKES = {"tensor", "zeros", "ones", "full", "empty", "arange", "randn", "rand"}
# messages among processes that have no GPU, or over a group of the CPU's own
ON_CPUS_ALONE = {
    "tools/verify/doctor/clocks.py": "ranks of doctor meet over gloo",
    "tools/verify/mup_check/measure.py": "ranks of mup-check compute on CPUs",
}


def made_without_device(node: ast.expr, made: dict[str, ast.expr]) -> bool:
    """True of a call that makes a tensor of torch's default device, or of a name of its result."""
    if isinstance(node, ast.Name):
        source = made.get(node.id)
        return source is not None and made_without_device(source, {})
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    function = node.func
    from_torch = isinstance(function.value, ast.Name) and function.value.id == "torch"
    if from_torch and function.attr in MAKES:
        return not any(keyword.arg == "device" for keyword in node.keywords)
    # a stack of such tensors is one too, a copy on a device is none
    if from_torch and function.attr in ("stack", "cat") and node.args:
        parts = node.args[0]
        of_parts = parts.elts if isinstance(parts, ast.Tuple | ast.List) else ()
        return any(made_without_device(part, made) for part in of_parts)
    return False


def stray_messages(source: str) -> Iterator[int]:
    """Yield the lines of calls that send a tensor made without a device."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, functions):
            continue
        made: dict[str, ast.expr] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                made.setdefault(node.targets[0].id, node.value)
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in TRAVELS and node.args and made_without_device(node.args[0], made):
                yield node.lineno


def test_no_message_is_a_tensor_that_was_made_without_a_device() -> None:
    found: list[str] = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name not in ON_CPUS_ALONE:
                found += [f"{name}:{line}" for line in stray_messages(path.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("axis.sum_(torch.zeros(3))", [2]),
        ("x = torch.tensor([1.0])\n    axis.max_(x)", [3]),
        ("axis.max_(torch.stack((torch.ones(1), y)))", [2]),
        ("axis.sum_(torch.zeros(3, device=here))", []),
        ("axis.sum_(torch.zeros(3).to(here))", []),
    ],
)
def test_such_messages_are_found(body: str, lines: list[int]) -> None:
    assert [*stray_messages(f"def f():\n    {body}\n")] == lines


def test_what_is_left_out_is_there() -> None:
    for name in ON_CPUS_ALONE:
        assert [*stray_messages((ROOT / name).read_text("utf-8"))], name
