"""Imports torchtitan's kernels of GPUs with something in the place of Triton.

Tests call none of these kernels, and Triton takes a gigabyte. Programs import this before torchtitan.
Else nothing finds a Triton here, and torch, which looks for it too, least of all.
"""

# pyright: reportMissingImports=false

import importlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn
from unittest.mock import MagicMock

KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
# they look for Triton when they are imported themselves
THAT_LOOK = ("torch._dynamo", "torch._inductor.runtime.triton_compat")


def jit(*given: object, **settings: object) -> Callable[..., Any]:
    """Returns what takes the place of a kernel, which cannot be called, or of its decorator."""

    def refuse(*arguments: object, **named: object) -> NoReturn:
        raise NotImplementedError("this is a kernel of a GPU")

    return (lambda kernel: refuse) if settings else refuse


def import_kernels() -> None:
    """Imports the kernels, and takes back what was in the place of Triton."""
    for name in THAT_LOOK:
        importlib.import_module(name)
    triton = MagicMock(jit=jit)  # types of triton.language, which annotate kernels, are anything
    sys.modules.update({"triton": triton, "triton.language": triton.language})
    try:
        importlib.import_module(KERNELS)
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


import_kernels()
