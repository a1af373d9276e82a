"""The weights of checkpoints in their mean, in the order of their training, the oldest first.

With n checkpoints, of which i = 0 is the oldest:

    uniform   1 / n
    linear    1 / n too, the mean that stands for a linear tail of the learning rate (below)
    sqrt      sqrt((i + 1) / n) - sqrt(i / n), the mean that stands for a 1 - sqrt tail
    ema:B     (1 - B) B^(n - 1 - i), but B^(n - 1) for i = 0: the last value of an exponential
              moving average m that begins at the oldest checkpoint, m = B m + (1 - B) checkpoint

`linear` and `sqrt` are those of "WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging for
LLM Pre-training" (arXiv 2507.17634): the mean of checkpoints along a constant learning rate is the
first of them plus the steps between them, each times the weights of all checkpoints after it. A
tail f that falls from f(0) = 1 to f(1) = 0 gives the steps its factors if checkpoint i has the
weight f(i / n) - f((i + 1) / n); the tails are f(x) = 1 - x and f(x) = 1 - sqrt(x). Megatron-LM has
the same weights (`tools/checkpoint/weighted_merge.py`, styles `linear` and `minus-sqrt`). Both
suppose that the checkpoints are equally far apart.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from megaprec.errors import UserError

EMA = "ema:"
# What decimals such as 1/3 may miss of a sum of 1: far less than FP32 resolves.
SUM_TOLERANCE = 1e-9


def weights_of_average(average: str, count: int) -> list[float]:
    """Return the weights of `count` checkpoints in an average that is named as above.

    They sum to 1 but for rounding. Raises UserError for another name.
    """
    if average in ("uniform", "linear"):
        return [1 / count] * count
    if average == "sqrt":
        edges = [math.sqrt(number / count) for number in range(count + 1)]
        return [upper - lower for lower, upper in pairwise(edges)]
    decay = _decay_of(average)
    weights = [decay ** (count - 1)]
    for number in range(1, count):
        newer = count - 1 - number  # checkpoints after this one
        weights.append((1 - decay) * decay**newer)
    return weights


def _decay_of(average: str) -> float:
    """Return B of ema:B."""
    decay = math.nan
    if average.startswith(EMA):
        decay = _number(average.removeprefix(EMA))
    # Not for NaN either, which no comparison holds for.
    if not 0 < decay < 1:
        raise UserError.of("convert.merge_average", average=average)
    return decay


def given_weights(text: str, count: int) -> list[float]:
    """Return weights that a user gives for `count` checkpoints, separated by commas.

    Raises UserError unless they are numbers of 0 or more that sum to 1.
    """
    weights = [_number(part) for part in text.split(",")]
    if not all(0 <= weight < math.inf for weight in weights):
        raise UserError.of("convert.merge_weights_form", weights=text)
    if len(weights) != count:
        raise UserError.of(
            "convert.merge_weights_count", weights=text, given=len(weights), inputs=count
        )
    total = sum(weights)
    if abs(total - 1) > SUM_TOLERANCE:
        raise UserError.of("convert.merge_weights_sum", weights=text, total=f"{total:.12g}")
    return weights


def _number(text: str) -> float:
    """Return the number that a text is; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def described(weights: Sequence[float], names: Sequence[str]) -> list[str]:
    """Return a line for each weight, with the name of its checkpoint."""
    weighted = zip(weights, names, strict=True)
    return [f"{weight:.6f} x {name}" for weight, name in weighted]
