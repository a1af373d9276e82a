"""C kernels for the optimizer step on a CPU: one pass over memory for the statistics, one for
AdamW.

torch's operators read the gradients twice for norm and zeros, and are launched again for each block
of an update that has to stay in the cache. `native.c` reads memory once for each of the two. It is
compiled at first use for this machine, with `cc` or the compiler in the variable CC. The library is
stored in the user's cache folder under a name derived from everything that it depends on, so that
any number of ranks may compile it at once.
"""

import ctypes
import hashlib
import math
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from megaprec.errors import UserError
from megaprec.optim.update_rules import AdamW, Step, UpdateRule
from megaprec.optim.update_tile import Tile

_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # native.c says itself which multiply-adds are fused
    "-fopenmp",
)
_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long


class _StepNumbers(ctypes.Structure):
    """The numbers that all elements share in a step: FP32, computed in FP64."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in (
            "divisor",
            "decay",
            "beta1_rest",
            "beta2",
            "beta2_rest",
            "root",
            "eps",
            "step_size",
        )
    )


class Kernels:
    """The compiled functions. Raises UserError if there is no compiler or it fails."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(_compile()))
        self._statistics = library.megaprec_statistics
        self._adamw = library.megaprec_adamw
        self._statistics.argtypes = [_POINTER, _LONG, _POINTER, _POINTER, ctypes.c_int]
        self._adamw.argtypes = [*[_POINTER] * 5, _LONG, _StepNumbers, ctypes.c_int]
        self._statistics.restype = None
        self._adamw.restype = None
        self._span = int(library.megaprec_span())  # elements of a sum, whatever the threads

    def reads(self, values: Tensor) -> bool:
        """Return True if `statistics` supports these values."""
        is_on_cpu = values.device.type == "cpu"
        return is_on_cpu and values.dtype == torch.float32 and values.is_contiguous()

    def statistics(self, values: Tensor) -> Tensor:
        """Return float64 [2] of flat FP32 values on a CPU: the sum of squares and the number of
        zeros, including -0.0.

        The sum is finite exactly if all values are. The result does not depend on the number of
        threads.
        """
        assert self.reads(values)
        spans = -(-values.numel() // self._span)
        sums = torch.zeros(spans, dtype=torch.float64)
        zeros = torch.zeros(spans, dtype=torch.int64)
        self._statistics(
            values.data_ptr(),
            values.numel(),
            sums.data_ptr(),
            zeros.data_ptr(),
            torch.get_num_threads(),
        )
        return torch.stack((sums.sum(), zeros.sum().double()))

    def updates(self, tile: Tile) -> bool:
        """Return True if `adamw_` supports the tile.

        Masters, gradients and moments must be FP32, weights FP32 or rounded to nearest bf16.
        """
        if tile.masters is None or len(tile.state) != 2:
            return False
        weights = tile.weights
        moments = [moment for _, moment in tile.state]
        for values in (tile.masters, tile.grads, *moments):
            if not self.reads(values) or values.numel() != weights.numel():
                return False
        if weights.data_ptr() == tile.masters.data_ptr():
            return True
        is_rounded = weights.dtype == torch.bfloat16 and tile.nearest
        return is_rounded and weights.device.type == "cpu" and weights.is_contiguous()

    def adamw_(self, tile: Tile, rule: AdamW, step: Step) -> None:
        """Update all elements of the tile, without reading `skip`. The gradients are not
        changed."""
        assert self.updates(tile) and tile.masters is not None
        (_, first_moment), (_, second_moment) = tile.state
        tensors = (tile.masters, tile.grads, first_moment, second_moment)
        weights = tile.weights.data_ptr()
        is_separate = weights != tile.masters.data_ptr()
        self._adamw(
            *(values.data_ptr() for values in tensors),
            weights if is_separate else None,  # nothing to round if the weights are the masters
            tile.grads.numel(),
            _step_numbers(rule, step),
            torch.get_num_threads(),
        )


def kernels_for(rule: UpdateRule, device: torch.device) -> Kernels:
    """Return the kernels. Raise UserError for a rule or a device that they do not support."""
    if type(rule) is not AdamW or device.type != "cpu":
        raise UserError.of(
            "optimizer.native_unsupported", kind=type(rule).__name__, type=device.type
        )
    return Kernels()


def _step_numbers(rule: AdamW, step: Step) -> _StepNumbers:
    beta1, beta2 = rule.betas
    steps = float(step.steps)
    # computed in FP64 and rounded to FP32 once
    return _StepNumbers(
        divisor=min(float(step.divisor), torch.finfo(torch.float32).max),
        decay=1 - step.lr * step.weight_decay,
        beta1_rest=1 - beta1,
        beta2=beta2,
        beta2_rest=1 - beta2,
        root=math.sqrt(1 - beta2**steps),
        eps=rule.eps,
        step_size=step.lr / (1 - beta1**steps),
    )


def _compile() -> Path:
    """Return the path of the library, compiled if it is missing.

    Its name is a hash of the source, the flags, the compiler and the instruction set.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    target = _run([*compiler, *_FLAGS, "-dM", "-E", "-x", "c", os.devnull])
    inputs = (_SOURCE.read_text(encoding="utf-8"), shlex.join([*compiler, *_FLAGS]), target)
    digest = hashlib.sha256(repr(inputs).encode()).hexdigest()
    cache = _cache_folder()
    library = cache / f"native-{digest[:24]}.so"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        # a library that others can replace would run their code
        if cache.stat().st_uid != os.getuid() or cache.stat().st_mode & 0o022:
            raise UserError.of("optimizer.native_folder_unsafe", cache=cache)
        if library.exists():
            return library
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            output = Path(folder) / "native.so"
            _run([*compiler, *_FLAGS, "-shared", "-fPIC", "-o", str(output), str(_SOURCE), "-lm"])
            output.replace(library)  # at once, whatever other ranks do
    except OSError as error:
        raise UserError.of("optimizer.native_no_folder", error=error) from error
    return library


def _cache_folder() -> Path:
    """Return the folder of compiled libraries. Raises UserError if neither it nor a home folder is
    known."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megaprec"
    except RuntimeError as error:
        raise UserError.of("optimizer.native_no_folder", error=error) from error


def _run(command: list[str]) -> str:
    """Return the output of a compiler. Raise UserError if it cannot be run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise UserError.of("optimizer.native_no_compiler", command=command[0]) from error
    except subprocess.CalledProcessError as error:
        error_lines = (line for line in error.stderr.splitlines() if "error" in line)
        printed = next(error_lines, "it printed no error")
        raise UserError.of(
            "optimizer.native_compile_failed", command=command[0], printed=printed
        ) from error
