"""Assumptions of a prediction, from measured speeds.

Speeds of products are taken between the measured shapes, for the shapes of the run's own layers.
What a layer takes beside its products and its attention is the time of operators that move memory,
in a wide layer, and the fixed cost of its operators, in a narrow one. What was not measured keeps
its value from the data sheet, and is named.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, log2
from statistics import median
from typing import TypeVar

from megaprec.precision.plan import dtype_name
from models.config import ModelConfig
from models.decoder.stages import Cut
from models.estimate.flops import StageCost, stage_costs
from tools.analysis.calibration.record import (
    AttentionRow,
    Calibration,
    CollectiveRow,
    LayerRow,
    LossRow,
    ProductRow,
)
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.seconds.attention import BACKWARD, attention_seconds
from tools.analysis.planning.seconds.elementwise import elementwise_seconds
from tools.analysis.planning.seconds.products import product_seconds
from tools.config.run_file import RunConfig, load_run

FIXED_PASSES = 3  # of a layer's forward pass: forward, and twice as much backward
# of a CPU: what stands where nothing was measured
UNKNOWN_CPU = Assumptions(tflops=0.05, efficiency=0.5, fast=2.0, slow=2.0, machine=8, device="cpu")
NEAREST = 4  # measured shapes between which a speed is taken
AT_SHAPE = 0.1  # added to distances, so that a measured shape itself has a finite weight
LEAST_SHARE = 0.05  # of a layer's time, that is left beside its products and attention
LEAST_SECONDS = 1e-9

Row = TypeVar("Row", ProductRow, AttentionRow, LayerRow, LossRow)


@dataclass(frozen=True)
class Calibrated:
    """The speeds of a run on a measured machine. missing: what was not measured, in words."""

    assumed: Assumptions
    missing: tuple[str, ...]


def calibrated(config: RunConfig, calibration: Calibration, known: Assumptions) -> Calibrated:
    """Return the speeds of a run. known: those that stand where nothing was measured."""
    dtype = dtype_name(config.plan.compute)
    machine = _Machine(config, calibration, dtype)
    missing = list[str]()
    assumed = known
    if machine.products:
        assumed = machine.with_products(assumed)
        assumed = machine.with_attention(assumed) if machine.attention else assumed
        assumed = machine.with_layers(assumed) if machine.layers else assumed
        if machine.loss:
            first_loss = machine.loss[0]
            assumed = replace(assumed, logit=first_loss.seconds_of_logit)
    for kind, rows in machine.rows_by_kind.items():
        if not rows:
            missing.append(f"{kind} in {dtype}")
    if calibration.collectives:
        assumed = _with_collectives(assumed, calibration.collectives)
    else:
        missing.append("collectives")
    if calibration.device == "cpu":
        assumed = _on_shared_cores(assumed, config, calibration)
    return Calibrated(assumed, tuple(missing))


class _Machine:
    """The measurements in the run's dtype with as many threads as a rank of the run has; if none
    has so many, those of the nearest number."""

    def __init__(self, config: RunConfig, calibration: Calibration, dtype: str) -> None:
        self.config = config
        threads = threads_of(config, calibration)
        measured = {row.threads for row in calibration.products if row.dtype == dtype}
        nearest = min(measured, key=lambda count: abs(count - threads), default=1)
        self.products = _rows_of(calibration.products, dtype, nearest)
        self.attention = _rows_of(calibration.attention, dtype, nearest)
        self.layers = _rows_of(calibration.layers, dtype, nearest)
        self.loss = _rows_of(calibration.loss, dtype, nearest)

    @property
    def rows_by_kind(self) -> dict[str, Sequence[object]]:
        """The measurements by kind, in words."""
        return {
            "products": self.products,
            "attention": self.attention,
            "layers": self.layers,
            "loss": self.loss,
        }

    def with_products(self, known: Assumptions) -> Assumptions:
        """Return the assumptions with the speed of products of the run's shapes, as a fraction of
        the fastest that were measured, or of the data sheet's peak."""
        speed = _speed_of_products(self.config, self.products)
        if known.device == "cpu":
            fastest = max(row.flops / row.seconds for row in self.products)
            return replace(known, tflops=fastest / 1e12, efficiency=speed / fastest)
        peak = known.tflops * 1e12
        return replace(known, efficiency=speed / peak)

    def with_attention(self, known: Assumptions) -> Assumptions:
        """Return the assumptions with the speed of attention, as a fraction of that of products."""
        tokens = self.config.train.seq_length / self.config.parallel.context
        speed = _speed_of_attention(self.attention, tokens)
        speed_of_products = known.tflops * 1e12 * known.efficiency
        return replace(known, attention=speed / speed_of_products)

    def with_layers(self, known: Assumptions) -> Assumptions:
        """Return the assumptions with the times of a layer beside its products and attention.

        These are a fixed time, which on a GPU is that of launching its kernels, and the bandwidth
        of memory at which operators between products work. The narrowest measured layer has the
        fixed time and next to nothing else; the wider ones tell the bandwidth.
        """
        by_width = sorted(self.layers, key=lambda row: row.hidden)
        narrowest = by_width[0]
        fixed = narrowest.seconds / FIXED_PASSES
        # The measured layers are not compiled. A GPU computes while further kernels are launched, a
        # CPU does not.
        if known.device == "cpu":
            with_fixed = replace(known, layer=fixed, launch=0.0, bandwidth=inf)
        else:
            with_fixed = replace(known, launch=fixed, bandwidth=inf)
        bandwidths = [self._bandwidth_of(row, with_fixed) for row in by_width[1:]]
        if not bandwidths:
            return with_fixed
        return replace(with_fixed, bandwidth=median(bandwidths))

    def _bandwidth_of(self, row: LayerRow, assumed: Assumptions) -> float:
        """Return the GB/s at which a measured layer moves what is between its products, if these
        and its attention take as long as by themselves."""
        config = _run_of_layer(row, assumed.device)
        # a stage in the middle of a pipeline
        cut = Cut(1, range(1), first=False, last=False)
        (cost,) = stage_costs(config.sized_model, [cut], row.tokens, 1)
        peak = assumed.tflops * 1e12
        speed = _speed_of_products(config, self.products)
        of_shape = replace(assumed, efficiency=speed / peak)
        if self.attention:
            attention_speed = _speed_of_attention(self.attention, row.tokens)
            of_shape = replace(of_shape, attention=attention_speed / speed)
        known_seconds = sum_of_products(config, cost, of_shape)
        known_seconds += sum(attention_seconds(config, cost, of_shape))
        known_seconds += FIXED_PASSES * assumed.layer
        # products by themselves may take as long as the whole layer: something is always left
        least = LEAST_SHARE * row.seconds
        remaining = max(row.seconds - known_seconds, least)
        at_one_gigabyte = replace(of_shape, bandwidth=1.0)
        # at 1 GB/s the seconds are the gigabytes
        gigabytes = sum(elementwise_seconds(config, cost, at_one_gigabyte))
        return gigabytes / remaining


def _rows_of(rows: Sequence[Row], dtype: str, threads: int) -> list[Row]:
    """Return the measurements in a dtype with so many threads."""
    return [row for row in rows if row.dtype == dtype and row.threads == threads]


def threads_of(config: RunConfig, calibration: Calibration) -> int:
    """Return the CPU threads of a rank of the run: all local ranks share the cores."""
    cores_of_rank = max(1, calibration.cores // config.world_size)
    return config.train.threads or cores_of_rank


def _speed_of_products(config: RunConfig, rows: Sequence[ProductRow]) -> float:
    """Return the FLOP/s of the products of the run's layers and its head."""
    flops = 0.0
    seconds = 0.0
    for tokens, inputs, outputs, count in _products_of(config):
        # a product and a sum for each pair of numbers
        flops_of_shape = 2 * count * tokens * inputs * outputs
        speed_of_shape = speed_between(rows, tokens, inputs, outputs)
        flops += flops_of_shape
        seconds += flops_of_shape / speed_of_shape
    return flops / seconds


def _products_of(config: RunConfig) -> Iterator[tuple[float, float, float, int]]:
    """Yield the products of a run on one rank: tokens, inputs, outputs, and how many there are."""
    model = config.sized_model
    tensor = config.parallel.tensor
    tokens = config.train.micro_batch * config.train.seq_length / config.parallel.context
    for kind, layers in model.count_kinds(range(model.layers)):
        shapes: list[tuple[float, float, float, int]] = []
        if kind.has_mixer:
            shapes += _mixer_products(kind, tokens, tensor)
        if kind.has_feed_forward:
            shapes += _feed_forward_products(kind, tokens, tensor)
        for rows, inputs, outputs, count_of_layer in shapes:
            count = layers * count_of_layer
            yield rows, inputs, outputs, count
    # the head
    vocab_of_rank = model.vocab / tensor
    yield tokens, model.hidden, vocab_of_rank, 1


def _mixer_products(
    kind: ModelConfig, tokens: float, tensor: int
) -> Iterator[tuple[float, float, float, int]]:
    """Yield the products of a layer's attention, or of the recurrence in its place: those that make
    its inputs, and the one of its output.

    Each is given as tokens, inputs, outputs, and how many there are.
    """
    if recurrence := kind.delta_net or kind.mamba:
        width = recurrence.projected_width
    else:
        kv_matrices = 1 if kind.global_key_as_value else 2
        projected_heads = kind.heads + kv_matrices * kind.kv_heads
        width = projected_heads * kind.head_dim
    yield tokens, kind.hidden, width / tensor, 1
    # Kimi Delta Attention makes its gate and its decay from `rank` features
    if rank := kind.delta_net.gate_rank:
        gate_width = kind.delta_net.value_width / tensor
        decay_width = kind.delta_net.decay_width / tensor
        yield tokens, rank, gate_width, 1
        yield tokens, rank, decay_width, 1
    yield tokens, kind.mixer_width / tensor, kind.hidden, 1


def _feed_forward_products(
    kind: ModelConfig, tokens: float, tensor: int
) -> Iterator[tuple[float, float, float, int]]:
    """Yield the products of a layer's feed-forward, or of its experts, up and down: each as tokens,
    inputs, outputs, and how many there are."""
    matrices = 2 if kind.gated else 1  # those that go up
    width_up = matrices * kind.ffn / tensor
    width_down = kind.ffn / tensor
    if not kind.experts:
        yield tokens, kind.hidden, width_up, 1
        yield tokens, width_down, kind.hidden, 1
        return
    # if all experts get as many tokens
    expert_tokens = max(1.0, tokens * kind.experts_per_token / kind.experts)
    yield expert_tokens, kind.hidden, width_up, kind.experts
    yield expert_tokens, width_down, kind.hidden, kind.experts
    if kind.shared_experts:
        shared_width_up = matrices * kind.shared_experts / tensor
        shared_width_down = kind.shared_experts / tensor
        yield tokens, kind.hidden, shared_width_up, 1
        yield tokens, shared_width_down, kind.hidden, 1


def speed_between(
    rows: Sequence[ProductRow], tokens: float, inputs: float, outputs: float
) -> float:
    """Return the FLOP/s of products of a shape: the geometric mean of the measured speeds of the
    `NEAREST` shapes, each weighted by the inverse square of its distance."""

    def distance(row: ProductRow) -> float:
        """Return how far a shape is, in powers of two."""
        ratios = (row.tokens / tokens, row.inputs / inputs, row.outputs / outputs)
        squares = sum(log2(ratio) ** 2 for ratio in ratios)
        return squares**0.5

    nearest = sorted(rows, key=distance)[:NEAREST]
    weighted_logs = 0.0
    weights = 0.0
    for row in nearest:
        speed = row.flops / row.seconds
        weight = 1 / (distance(row) + AT_SHAPE) ** 2
        weighted_logs += weight * log2(speed)
        weights += weight
    mean_log = weighted_logs / weights
    return 2**mean_log


def _speed_of_attention(rows: Sequence[AttentionRow], tokens: float) -> float:
    """Return the FLOP/s of attention of so many tokens, as of the nearest number measured."""
    nearest = min(rows, key=lambda row: abs(log2(row.tokens / tokens)))
    # two products, of scores and of sums of values, with two FLOPs a pair; the causal half of both
    forward_flops = 2 * 2 * nearest.tokens**2 * nearest.heads * nearest.head_dim / 2
    flops = (1 + BACKWARD) * forward_flops
    return flops / (nearest.forward + nearest.backward)


def _run_of_layer(row: LayerRow, device: str) -> RunConfig:
    """Return a run whose layers are those that were measured."""
    keys = (
        'model.family="llama"',
        "model.layers=1",
        f"model.hidden={row.hidden}",
        f"model.heads={row.heads}",
        f"model.ffn={row.ffn}",
        "model.vocab=256",
        "data.vocab_size=256",
        f'precision.compute="{row.dtype}"',
        "train.steps=1",
        "train.global_batch=1",
        "train.micro_batch=1",
        f"train.seq_length={row.tokens}",
        # as they were measured
        'train.compile="off"',
    )
    return load_run(None, keys).on_device(device)


def sum_of_products(config: RunConfig, cost: StageCost, assumed: Assumptions) -> float:
    """Return the seconds of a stage's products, forward and backward."""
    products = product_seconds(config, cost, assumed)
    return products.forward + products.input + products.weight + products.recomputed


def _with_collectives(known: Assumptions, rows: Sequence[CollectiveRow]) -> Assumptions:
    """Return the assumptions with the latency of the smallest messages and the bandwidth of the
    largest, of the median kind of collective."""
    latencies = list[float]()
    bandwidths = list[float]()
    for kind in {row.kind for row in rows}:
        of_kind = [row for row in rows if row.kind == kind]
        smallest = min(of_kind, key=lambda row: row.bytes)
        largest = max(of_kind, key=lambda row: row.bytes)
        hops = max(1, smallest.ranks - 1)
        latencies.append(smallest.seconds / hops)
        # their difference is without the latency; noise may make it 0 or less
        more_bytes = largest.bytes - smallest.bytes
        more_seconds = max(largest.seconds - smallest.seconds, LEAST_SECONDS)
        if not more_bytes:
            # one size alone does not tell latency and bandwidth apart
            more_bytes = largest.bytes
            more_seconds = largest.seconds
        bandwidths.append(more_bytes / more_seconds)
    gigabytes = median(bandwidths) / 1e9
    # ranks of a CPU never leave the machine
    slow = gigabytes if known.device == "cpu" else known.slow
    return replace(known, fast=gigabytes, slow=slow, hop=median(latencies))


def _on_shared_cores(
    assumed: Assumptions, config: RunConfig, calibration: Calibration
) -> Assumptions:
    """Return the assumptions with the number of ranks that share a core: all run on one machine."""
    ranks = config.world_size
    crowd = max(1.0, ranks / calibration.cores)
    machine = max(ranks, assumed.machine)
    return replace(assumed, crowd=crowd, machine=machine)
