"""Few layers that stand for many: of every kind that the many have, spread as theirs are."""

from collections.abc import Sequence
from typing import Any


def spread(kinds: Sequence[Any], num_layers: int) -> list[Any]:
    """Return the kinds of `num_layers` layers that stand for the layers of a deeper model.

    kinds: the kind of each layer of that model; any values that can be compared.
    The kinds are taken at equal distances. A kind that would be missing takes the place of the last
    layer whose kind other layers have too; with fewer layers than kinds some kinds are left out.
    Empty if `kinds` is.
    """
    if not kinds:
        return []
    chosen: list[Any] = []
    for layer in range(num_layers):
        layer_of_model = layer * len(kinds) // num_layers
        chosen.append(kinds[layer_of_model])
    missing = [kind for kind in dict.fromkeys(kinds) if kind not in chosen]
    for kind in reversed(missing):
        replaceable = [place for place, other in enumerate(chosen) if chosen.count(other) > 1]
        if replaceable:
            last_replaceable = replaceable[-1]
            chosen[last_replaceable] = kind
    return chosen
