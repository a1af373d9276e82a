"""Comparison of a layout with the oracle.

Unlike one process, the oracle has no activations by megaprec's modules, and no numbers of its
scaler. Weights and moments are compared with its own, after each step. AdamW divides a gradient by
its own size, so that an element whose gradient is small moves by the rounding of a larger one: the
bound of weights and moments is never less than 1e-9.
"""

from collections.abc import Iterator

from tools.verify.parity.compare import (
    Difference,
    StepComparison,
    compare_copies,
    compare_exactly,
    compare_initial_weights,
    compare_shapes,
)
from tools.verify.parity.noise import Noise, undetermined
from tools.verify.parity.record import Record

UPDATED_BOUND = 1e-9  # the least bound of weights and moments


def compare_with_oracle(candidate: Record, oracle: Record, noise: Noise) -> list[Difference]:
    """Return all comparisons of a layout with the oracle, in the order of a step."""
    differences = [
        *compare_shapes(candidate, oracle),
        *compare_initial_weights(candidate, oracle),
        *compare_copies(candidate, "before/"),
    ]
    for step in range(len(oracle.steps)):
        comparison = StepComparison(candidate, oracle, noise, step)
        differences += _compare_step(comparison)
    return differences


def _compare_step(comparison: StepComparison) -> Iterator[Difference]:
    """Yield the differences of a layout from the oracle in one step, in the order of its
    computation."""
    step = comparison.step
    number = step + 1
    candidate = comparison.candidate
    oracle = comparison.reference
    samples = (candidate.samples[step], oracle.samples[step])
    yield compare_exactly("sample ids", "", number, *samples)
    yield comparison.number("loss", "loss")
    # the last layer's gradients arise first
    yield from comparison.tensors("gradient", f"gradient/{step}", oracle.names[::-1])
    yield from compare_copies(candidate, f"gradient/{step}")
    yield comparison.number("gradient norm", "grad_norm")
    outcomes = (record.steps[step]["outcome"] for record in (candidate, oracle))
    yield compare_exactly("found_inf", "outcome", number, *outcomes)
    yield comparison.number("learning rate", "lr")
    # how far a weight may be from the oracle's where rounding alone decides which way it moves
    free_distances = undetermined(oracle, comparison.noise, step)
    for kind in oracle.tensors:
        if not kind.startswith(f"after/{step}/"):
            continue
        state = kind.rpartition("/")[2]
        quantity = "weights" if state == "weight" else "moments"
        # moments follow gradients, which rounding moves by very little
        may_differ = free_distances if state in ("weight", "ema") else None
        yield from comparison.tensors(quantity, kind, oracle.names, UPDATED_BOUND, may_differ)
    yield from compare_copies(candidate, f"after/{step}/")
    for conflict_step, quantity in candidate.rank_conflicts:
        if conflict_step == number:
            yield compare_exactly("ranks agree", quantity, number, "ranks", "disagree")
