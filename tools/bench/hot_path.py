"""A count of the project's code that one training step executes, for a reader who wants to follow a
step.

A small Llama in bf16 takes one step to warm up and one that is traced line by line on rank 0, under
1F1B with four micro-batches. Counted are the files of which a function ran, all lines of these
files, those that are code (neither blank nor a comment or docstring), all lines of the functions
that ran, and the lines that ran.
"""

import argparse
import ast
import json
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from parallel.mesh import make_mesh, world
from tools.bench.train import VOCAB, Bench
from tools.config.run_file import load_run
from tools.training.launch import start_ranks

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(str(ROOT / package) + os.sep for package in ("megaprec", "parallel", "models"))
RUN = (
    'model.family="llama"',
    f"model.vocab={VOCAB}",
    "model.layers=4",
    "model.hidden=64",
    "model.heads=4",
    "model.ffn=128",
    'precision.compute="bf16"',
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.steps=2",
    "train.seq_length=32",
)


def add_parser(subparsers: Any) -> None:
    """Add `hot-path` to the measurements."""
    parser = subparsers.add_parser(
        "hot-path", help="files and lines that a training step executes", description=__doc__
    )
    parser.add_argument("--tensor", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--pipeline", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--data", type=int, default=1, metavar="N", help="(default: 1)")
    parser.add_argument("--files", action="store_true", help="print a line for each file before")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench hot-path`: start the ranks, or be one of them.

    Raises UserError.
    """
    layout = (f"parallel.{name}={getattr(args, name)}" for name in ("tensor", "pipeline", "data"))
    config = load_run(None, [*RUN, *layout])
    if config.world_size > 1 and "RANK" not in os.environ:
        return start_ranks(
            [sys.executable, "-m", "tools.bench", *sys.argv[1:]], config.world_size, 1
        )
    torch.set_num_threads(1)
    with world():
        bench = Bench(config, make_mesh(args.pipeline, args.data, args.tensor))
        bench.step()
        with traced() as lines:
            bench.step()
        if dist.get_rank() == 0:
            report(lines, args.files)
    return 0


@contextmanager
def traced() -> Iterator[dict[Path, set[int]]]:
    """Provide the numbers of the lines that run inside, in this thread, by file of the project's
    library."""
    seen: dict[Path, set[int]] = {}

    def note(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGES):
            return None
        if event == "line":
            seen.setdefault(Path(frame.f_code.co_filename), set()).add(frame.f_lineno)
        return note

    sys.settrace(note)
    try:
        yield seen
    finally:
        sys.settrace(None)


def report(lines: dict[Path, set[int]], by_file: bool = False) -> None:
    """Print one line of JSON with the sums; before it one for each file, if that is asked for."""
    rows: list[dict[str, Any]] = []
    for file, executed in sorted(lines.items()):
        row = {"file": str(file.relative_to(ROOT))}
        row |= counts(file.read_text(encoding="utf-8"), executed)
        rows.append({**row, "executed": len(executed)})
    if by_file:
        for row in rows:
            print(json.dumps(row))
    sums = {"files": len(rows)}
    for key in ("lines", "code", "functions", "executed"):
        sums[key] = sum(row[key] for row in rows)
    print(json.dumps(sums), flush=True)


def counts(source: str, executed: Collection[int]) -> dict[str, int]:
    """Return the number of all lines of a module, of those that are code, and of those of the
    functions that ran. executed: numbers of lines."""
    lines = source.splitlines()
    functions = set[int]()
    code: set[int] = set()
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.strip().startswith("#"):
            code.add(number)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):  # a docstring
                code -= _lines_of(node)
        elif isinstance(node, ast.FunctionDef):
            body = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
            if any(number in body for number in executed):
                functions |= _lines_of(node)
    return {"lines": len(lines), "code": len(code), "functions": len(functions)}


def _lines_of(node: ast.stmt) -> set[int]:
    return {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
