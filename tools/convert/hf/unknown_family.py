"""The refusal of a config.json whose model_type is not known: the nearest family by its keys, what
differs by name, and the ways out.

Nearest is the family that knows most keys of the file, and of several the one that has fewest
besides. The file is not read as a model of that family: what no key says may differ too.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megaprec.errors import UserError
from tools.convert.hf.families import FAMILIES
from tools.convert.hf.keys import FREE, IDS, ConfigKeys, short

Json = Mapping[str, Any]
MOST_NAMED = 8  # keys of a line
# By these no family is told from another.
_OF_NO_FAMILY = {*FREE, *IDS, "rope_theta", "initializer_range"}
_NUMBERS_OF_LAYERS = {
    "num_hidden_layers",
    "n_layer",
    "layers_block_type",
    "hybrid_override_pattern",
}


class Nearest(NamedTuple):
    """A family that is known, beside a config.json that is of another.

    foreign: keys of the file that the family has not, or not with these values.
    missing: keys of the family, with numbers as defaults, that the file has not.
    """

    name: str
    foreign: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def distance(self) -> tuple[int, int]:
        """Return how far the family is: first by what the file says and it does not know."""
        return len(self.foreign), len(self.missing)


def unknown_family(config: Json) -> UserError:
    """Return the error about a config.json of a model_type that is not known."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return UserError.of("convert.hf_model_type_missing", readers=", ".join(FAMILIES))
    nearest = nearest_family(config)
    if nearest is None:
        return UserError.of("convert.hf_model_type_other", kind=kind)
    differences = []
    if nearest.foreign:
        stated = [f"{key} = {short(config[key])}" for key in nearest.foreign]
        differences.append(f"does not know {_listed(stated)}")
    if nearest.missing:
        differences.append(f"has {_listed(nearest.missing)} besides")
    if not differences:
        differences.append("has the same keys")
    return UserError.of(
        "convert.hf_model_type",
        kind=kind,
        nearest=nearest.name,
        differences=" and ".join(differences),
    )


def _listed(names: Sequence[str]) -> str:
    """Return the first of some names in words, and how many more there are."""
    shown = ", ".join(names[:MOST_NAMED])
    return shown if len(names) <= MOST_NAMED else f"{shown} and {len(names) - MOST_NAMED} more"


def nearest_family(config: Json) -> Nearest | None:
    """Return the family whose keys are most like those of a config.json; None if it does not say
    the number of layers by a name that is known. Of several the first of `FAMILIES`."""
    stated = {key: value for key, value in config.items() if value is not None}
    candidates: list[Nearest] = []
    for name in FAMILIES:
        candidate = _beside(stated, name)
        if candidate is not None:
            candidates.append(candidate)
    return min(candidates, key=lambda candidate: candidate.distance, default=None)


def _beside(stated: Json, name: str) -> Nearest | None:
    """Return how the family `name` differs from what a config.json states; None if the file has not
    its number of layers, or if two of its keys contradict each other."""
    family = FAMILIES[name]
    foreign = dict[str, None]()  # a set that keeps the order
    keys = _keys_of(stated, name, foreign)
    if keys is None or not keys.stated.keys() & _NUMBERS_OF_LAYERS & family.defaults.keys():
        return None
    for entry in family.entries:
        earlier = keys.read_so_far
        try:
            keys.read(entry)
        except UserError as error:
            # a refusal may name a value inside of its key alone
            of_entry = [key for key in stated if key in keys.read_so_far - earlier]
            foreign |= dict.fromkeys(_named_in(error, stated) or of_entry)
        except (TypeError, ValueError, ZeroDivisionError, AttributeError):
            continue  # it counts with a key that is missing, or that is told already
    foreign |= dict.fromkeys(problem.fields["key"] for problem in keys.unread())
    missing = [
        key
        for key, default in family.defaults.items()
        if _is_size(default) and key not in keys.stated and key not in _OF_NO_FAMILY
    ]
    return Nearest(name, tuple(key for key in foreign if key in stated), tuple(missing))


def _keys_of(stated: Json, name: str, foreign: dict[str, None]) -> ConfigKeys | None:
    """Return the keys of a config.json as those of a family, without those whose values are of
    another kind, which are added to `foreign`; None if two of them contradict each other."""
    family = FAMILIES[name]
    of_family = {**stated, "model_type": name}
    try:
        return ConfigKeys(of_family, family)
    except UserError as error:
        foreign |= dict.fromkeys(_named_in(error, stated))
    readable = {key: value for key, value in of_family.items() if key not in foreign}
    try:
        return ConfigKeys(readable, family)
    except UserError:
        return None


def _named_in(error: UserError, stated: Json) -> list[str]:
    """Return the keys of a config.json that a refusal names."""
    words = set(re.findall(r"\w+", " ".join(error.problems)))
    return [key for key in stated if key in words and key not in _OF_NO_FAMILY]


def _is_size(value: Any) -> bool:
    """Return True for a number above 0, which a model cannot do without."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
