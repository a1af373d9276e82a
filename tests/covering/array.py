"""A covering array of strength 3 among the combinations that a program takes.

The packages that make such arrays (allpairspy, covertable) want rules over parts of a row. Which
combinations a run file refuses is known of whole rows only, so rows are made here: greedily, each
for a combination that none has yet, with as many other new ones as can be.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]
Combination = tuple[tuple[str, str], ...]  # of an option and the name of its value
TRIES = 12  # of rows around a combination, before it stands alone
REFRESHED = 0.05


def combinations_of(
    options: Mapping[str, Sequence[str]], strength: int, having: str = ""
) -> Iterator[Combination]:
    """Yield each combination of values of `strength` options, one of which is `having` if given."""
    for names in combinations(options, strength):
        if having and having not in names:
            continue
        for values in product(*(options[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


class Array:
    """Rows that together have each combination that can be.

    options: names of values by option, the first of which is its default.
    wanted: the combinations, in the order of the options.
    takes: True for a row that is not refused.
    is_cheap: True for a row that is not costly; others are made only of combinations that need one.
    needed: values that a combination may need of other options, to be taken at all.
    left: combinations of which no row has been counted yet. refused: those that are refused with
        all other options at their defaults, and with each of `needed`.
    """

    def __init__(
        self,
        options: Mapping[str, Sequence[str]],
        wanted: Iterable[Combination],
        takes: Callable[[Row], bool],
        is_cheap: Callable[[Row], bool],
        seed: int,
        needed: Sequence[Row] = (),
    ) -> None:
        self.options = options
        self.needed = ({}, *needed)
        self.takes = takes
        self.is_cheap = is_cheap
        self.left = set(wanted)
        self.number = len(self.left)
        self.refused: set[Combination] = set()
        self._dice = random.Random(seed)
        self._having = defaultdict[tuple[str, str], list[Combination]](list)
        for combination in sorted(self.left):
            for entry in combination:
                self._having[entry].append(combination)

    def rows(self) -> Iterator[Row]:
        """Yield rows until each combination has been in one that was counted, or is refused. A row
        that is not counted is tried again by the next array."""
        # in an order of its own: that of a set hangs on the process
        order = sorted(self.left)
        self._dice.shuffle(order)
        for combination in order:
            if combination not in self.left:
                continue
            row = self._row_with(combination)
            if row is None:
                self.left.discard(combination)
                self.refused.add(combination)
                continue
            yield row

    def count(self, row: Row) -> None:
        """Take note of a row that has been tried."""
        entries = set(row.items())
        for entry in entries:
            seen = [one for one in self._having[entry] if entries.issuperset(one)]
            self.left.difference_update(seen)

    def _row_with(self, combination: Combination) -> Row | None:
        """A row that is taken and has the combination; None if there is none even with defaults."""
        for share in _shares():
            row = self._greedy(combination, share)
            if self.is_cheap(row) and self.takes(row):
                return row
        defaults = {option: values[0] for option, values in self.options.items()}
        for others in self.needed:
            alone = defaults | others | dict(combination)
            if self.takes(alone):
                return alone
        return None

    def _greedy(self, combination: Combination, share: float) -> Row:
        """A row with the combination, of whose other options a share has values with many new
        combinations, and the others have their defaults."""
        fixed = dict(combination)
        others = [option for option in self.options if option not in fixed]
        self._dice.shuffle(others)
        for option in others:
            values = list(self.options[option])
            if self._dice.random() >= share:
                fixed[option] = values[0]
                continue
            self._dice.shuffle(values)
            gains = {value: self._gain(fixed, (option, value)) for value in values}
            fixed[option] = max(values, key=gains.__getitem__)
        return {option: fixed[option] for option in self.options}

    def _gain(self, fixed: Row, entry: tuple[str, str]) -> int:
        """How many new combinations an entry has with those that are fixed."""
        entries = {*fixed.items(), entry}
        # those that were seen are taken out of the list now and then
        wanted = self._having[entry]
        if self._dice.random() < REFRESHED:
            wanted = self._having[entry] = [one for one in wanted if one in self.left]
        return sum(entries.issuperset(one) and one in self.left for one in wanted)


def _shares() -> Iterator[float]:
    """The shares of options that have other values than their defaults, in one try after the
    other."""
    for number in range(TRIES):
        yield 1 - number / TRIES
