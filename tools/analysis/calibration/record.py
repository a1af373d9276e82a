"""The file that `megaprec calibrate` writes and `megaprec plan --calibrated` reads.

It is TOML: `version`, what was measured (device, machine, cores, ranks, torch, date), and a list of
measurements of each kind. Times are seconds of the fastest try, on one rank while all local ranks
do the same, or while the first works alone with the threads of all.
"""

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megaprec.errors import UserError
from megaprec.parsing import MOST_SETTINGS, parse_toml, read_text
from megaprec.resources import cores
from models.estimate.storage import Device
from tools.console.toml import toml
from tools.saved.model_fields import requirement_of

VERSION = 1
COMMENT = (
    "# Written by megaprec calibrate: the speeds of this machine, for megaprec plan --calibrated."
)
CPU_FILE = Path("/proc/cpuinfo")
# what a machine can have of anything
Count = Annotated[int, Field(ge=1, le=1 << 53)]
# what a clock can tell, and far beyond what is measured
Seconds = Annotated[float, Field(ge=1e-12, le=1e6)]
# FLOPs, bytes or numbers a second: what no device is below or beyond
LEAST_SPEED = 1.0
MOST_SPEED = 1e21
Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "point to point"]


STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
NO_ROWS: Any = Field(default=(), strict=False)  # a list of TOML is no tuple


class _Row(BaseModel):
    """A measurement."""

    model_config = STRICT


class ProductRow(_Row):
    """The three products of a linear layer: x [tokens, inputs], weight [outputs, inputs].

    weight: the gradient of the weight, added to a gradient in FP32.
    """

    dtype: str
    threads: Count
    tokens: Count
    inputs: Count
    outputs: Count
    forward: Seconds
    input: Seconds
    weight: Seconds

    @property
    def seconds(self) -> float:
        """The time of all three products."""
        return self.forward + self.input + self.weight

    @property
    def flops(self) -> int:
        """The FLOPs of all three products."""
        return 3 * 2 * self.tokens * self.inputs * self.outputs


class AttentionRow(_Row):
    """Causal attention of one sequence."""

    dtype: str
    threads: Count
    tokens: Count
    heads: Count
    head_dim: Count
    forward: Seconds
    backward: Seconds


class LayerRow(_Row):
    """A whole layer of a Llama-style decoder on one sequence."""

    dtype: str
    threads: Count
    tokens: Count
    hidden: Count
    heads: Count
    ffn: Count
    forward: Seconds
    backward: Seconds

    @property
    def seconds(self) -> float:
        """The time of both passes."""
        return self.forward + self.backward


class LossRow(_Row):
    """The loss of tokens over a vocabulary."""

    dtype: str
    threads: Count
    tokens: Count
    vocab: Count
    forward: Seconds
    backward: Seconds

    @property
    def seconds_of_logit(self) -> float:
        """The time of both passes for each logit."""
        return (self.forward + self.backward) / (self.tokens * self.vocab)


class MemoryRow(_Row):
    """A sum of two tensors, `bytes` of which are read and written."""

    threads: Count
    bytes: Count
    seconds: Seconds


class CollectiveRow(_Row):
    """A collective of all local ranks, or a message to the next of them. bytes: that a rank sends
    in it."""

    kind: Collective
    ranks: Count
    bytes: Count
    seconds: Seconds


class Calibration(BaseModel):
    """All that was measured.

    machine: the processor's name, or the GPU's.
    ranks: that worked at a time, each with its share of the cores.
    process: bytes of memory of a rank that has joined the others and has taken a first pass.
    date: YYYY-MM-DD.
    """

    model_config = STRICT

    version: int
    device: Device
    machine: str
    cores: Count
    ranks: Count
    process: Count
    torch: str
    date: str
    products: tuple[ProductRow, ...] = NO_ROWS
    attention: tuple[AttentionRow, ...] = NO_ROWS
    layers: tuple[LayerRow, ...] = NO_ROWS
    loss: tuple[LossRow, ...] = NO_ROWS
    memory: tuple[MemoryRow, ...] = NO_ROWS
    collectives: tuple[CollectiveRow, ...] = NO_ROWS

    def lines(self) -> Iterator[str]:
        """Yield the lines of the file."""
        yield COMMENT
        values = dict(self)
        rows_by_kind = {kind: rows for kind, rows in values.items() if isinstance(rows, tuple)}
        for name, value in values.items():
            if name not in rows_by_kind:
                yield f"{name} = {toml(value)}"
        for kind, rows in rows_by_kind.items():
            yield f"{kind} = ["
            for row in rows:
                yield f"    {toml(dict(row))},"
            yield "]"


def _speeds(calibration: Calibration) -> Iterator[tuple[str, float]]:
    """Yield the kind of each measurement and its work a second, in FLOPs, numbers or bytes."""
    for product in calibration.products:
        yield "products", product.flops / product.seconds
    for attention in calibration.attention:
        width = attention.heads * attention.head_dim
        seconds = attention.forward + attention.backward
        yield "attention", attention.tokens**2 * width / seconds
    for layer in calibration.layers:
        weights = layer.hidden * (layer.hidden + layer.ffn)
        yield "layers", layer.tokens * weights / layer.seconds
    for loss in calibration.loss:
        yield "loss", 1 / loss.seconds_of_logit
    for moved in (*calibration.memory, *calibration.collectives):
        yield f"{moved.bytes} bytes", moved.bytes / moved.seconds


def machine_name(device: Device) -> str:
    """Return the name of this machine's GPU, or of its processor."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).name
    if CPU_FILE.is_file():
        for line in CPU_FILE.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def read_calibration(path: Path) -> Calibration:
    """Return what a file says. Raises UserError for a file that `megaprec calibrate` of this
    version has not written."""
    try:
        document: Mapping[str, Any] = parse_toml(read_text(path, MOST_SETTINGS))
    except (OSError, ValueError) as error:
        raise UserError.of("planning.calibration_form", path=path, problem=error) from error
    version = document.get("version")
    if version != VERSION:
        raise UserError.of("planning.calibration_version", path=path, version=version, own=VERSION)
    try:
        calibration = Calibration.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        problem = f"{place} = {first['input']!r} {requirement_of(first)}"
        raise UserError.of("planning.calibration_form", path=path, problem=problem) from error
    # sizes and times may each be right, and not belong together
    for kind, speed in _speeds(calibration):
        if not LEAST_SPEED <= speed <= MOST_SPEED:
            problem = f"{kind} at {speed:.3g} a second, the speed of no device"
            raise UserError.of("planning.calibration_form", path=path, problem=problem)
    return calibration


def differences(calibration: Calibration, device: Device) -> Iterator[str]:
    """Yield in what way this machine is another than the one that was measured; nothing of a GPU
    that is not here."""
    if calibration.torch != torch.__version__:
        yield f"torch {calibration.torch}, not {torch.__version__}"
    if device == "cuda" and not torch.cuda.is_available():
        return
    here = machine_name(device)
    if calibration.machine != here:
        yield f"{calibration.machine}, not {here}"
    if device == "cpu" and calibration.cores != cores():
        yield f"{calibration.cores} cores, not {cores()}"
