"""The records of a run's comparisons of FP8 with precision.compute, and their alarms.

`models.engine.fp8_shadow` makes them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from models.engine.fp8_shadow import Shadow
from tools.config.tables.precision_settings import FP8

SHADOW = "fp8_shadow"  # the kind of event
# The share of a tensor's numbers above which their loss is no rounding any more. Of normal numbers
# NVFP4 rounds 7 % to zero.
MOST_LOST = 0.5


def shadow_fields(shadow: Shadow, fp8: FP8) -> dict[str, Any]:
    """Return the fields that a comparison adds to the record of its step in metrics.jsonl."""
    _, lowest_cosine = shadow.worst
    fields: dict[str, Any] = {"shadow_loss_gap": shadow.gap, "shadow_cosine": lowest_cosine}
    messages = alarms(shadow, fp8)
    if messages:
        fields["shadow_alarm"] = "; ".join(messages)
    return fields


def shadow_event(shadow: Shadow, step: int, fp8: FP8) -> dict[str, Any]:
    """Return the event, for events.jsonl, of a step that was compared."""
    weight_name, cosine = shadow.worst
    return {
        "event": SHADOW,
        "step": step,
        "loss": shadow.loss,
        "wide_loss": shadow.wide_loss,
        "loss_gap": shadow.gap,
        "worst_cosine": cosine,
        "worst_weight": weight_name,
        "alarms": alarms(shadow, fp8),
        "cosines": dict(shadow.cosines),
        "saturated": dict(shadow.saturated),
        "underflowed": dict(shadow.underflowed),
    }


def alarms(shadow: Shadow, fp8: FP8) -> list[str]:
    """Return a line for each value outside of its band; none if the pass without FP8 is not finite,
    for it says nothing of FP8.
    """
    messages: list[str] = []
    if abs(shadow.gap) > fp8.shadow_loss_gap:
        messages.append(
            f"loss gap {shadow.gap:+.2%} is beyond fp8.shadow_loss_gap = {fp8.shadow_loss_gap:g}"
        )
    low_cosines = [cosine for cosine in shadow.cosines.values() if cosine < fp8.shadow_cosine]
    if low_cosines:
        weight_name, cosine = shadow.worst
        others = ""
        if len(low_cosines) > 1:
            others = f" and {len(low_cosines) - 1} more"
        messages.append(
            f"cosine {cosine:.3f} of {weight_name}{others} is below fp8.shadow_cosine = "
            f"{fp8.shadow_cosine:g}"
        )
    # a gradient that vanishes altogether has no cosine
    messages += _lost_alarms("saturate", shadow.saturated)
    messages += _lost_alarms("vanish", shadow.underflowed)
    return messages


def _lost_alarms(verb: str, shares: Mapping[str, float]) -> Iterator[str]:
    """Yield a line on the tensor that loses most of its numbers in casts, if any loses so many."""
    lossy_tensors = [name for name, share in shares.items() if share > MOST_LOST]
    if not lossy_tensors:
        return
    worst = max(lossy_tensors, key=shares.__getitem__)
    others = ""
    if len(lossy_tensors) > 1:
        others = f" and {len(lossy_tensors) - 1} more"
    yield f"{shares[worst]:.0%} of the numbers of {worst}{others} {verb}"
