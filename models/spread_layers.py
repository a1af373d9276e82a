"""Few layers that stand for many: of every kind that the many have, spread as theirs are."""

from collections.abc import Sequence
from typing import Any


def spread(kinds: Sequence[Any], num_layers: int) -> list[Any]:
    """Return the kinds of `num_layers` layers, spread as `kinds` are.

    Kinds that would be missing take the place of the last ones of which there are others; only
    with fewer layers than kinds some are left out. Of no kinds there are none.
    """
    if not kinds:
        return []
    chosen = [kinds[layer * len(kinds) // num_layers] for layer in range(num_layers)]
    missing = [kind for kind in dict.fromkeys(kinds) if kind not in chosen]
    for kind in reversed(missing):
        replaceable = [place for place, other in enumerate(chosen) if chosen.count(other) > 1]
        if replaceable:
            chosen[replaceable[-1]] = kind
    return chosen
