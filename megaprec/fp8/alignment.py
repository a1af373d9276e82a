"""Alignment of weights for FP8 hardware: tensor cores read eight-bit numbers in groups.

The first dim of a weight must be a multiple of 8 and the last of 16; with blocks, both must be
multiples of the block.
"""

from megaprec.precision.fp8_recipe import Kind

ALIGNMENT: dict[Kind, tuple[int, int]] = {
    "delayed": (8, 16),
    "current": (8, 16),
    "rowwise": (8, 16),
    "blockwise": (128, 128),
    "mx": (32, 32),
}


def misfit(kind: Kind, outputs: int, inputs: int) -> str:
    """Return why a weight [outputs, inputs], as one rank holds it, does not suit FP8; empty if it
    does."""
    rows, columns = ALIGNMENT[kind]
    problems = []
    if outputs % rows:
        problems.append(f"{outputs} outputs (dim 0) are no multiple of {rows}")
    if inputs % columns:
        problems.append(f"{inputs} inputs (dim 1) are no multiple of {columns}")
    return " and ".join(problems)


def padded(kind: Kind, outputs: int, inputs: int) -> tuple[int, int]:
    """Return the smallest aligned shape that can hold a weight [outputs, inputs]."""
    rows, columns = ALIGNMENT[kind]
    return -(-outputs // rows) * rows, -(-inputs // columns) * columns
