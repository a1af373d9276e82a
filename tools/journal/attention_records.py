"""Records of attention in metrics.jsonl.

The field "attention_logits" of a step has a list for each layer: the largest attention logit of
each head. Position n is layer n; modules of multi-token prediction follow the model's last layer.
null: a layer without attention, or a head whose logits were not finite.
"""

import math
from collections.abc import Sequence
from typing import Any

from megaprec.optim.decision.step_report import AttentionReport

ATTENTION_LOGITS = "attention_logits"  # the field of a step
DIGITS = 6  # significant ones: a model may have many heads


def attention_fields(attentions: Sequence[AttentionReport]) -> dict[str, Any]:
    """Return the fields of a step's record about its attention."""
    num_layers = 1 + max(attention.layer for attention in attentions)
    layers: list[list[float | None] | None] = [None] * num_layers
    for attention in attentions:
        layers[attention.layer] = [_rounded(logit) for logit in attention.largest_logits]
    return {ATTENTION_LOGITS: layers}


def _rounded(logit: float) -> float | None:
    return float(f"{logit:.{DIGITS}g}") if math.isfinite(logit) else None
