"""A covering array of strength 3 among the combinations that a program takes.

The packages that make such arrays (allpairspy, covertable) want rules over parts of a row. Which
combinations a run file refuses is known of whole rows only, so rows are made here: greedily, each
for a combination that none has yet, with as many other new ones as can be.
"""

import random
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, product

Row = dict[str, str]
Combination = tuple[tuple[str, str], ...]  # of an option and the name of its value


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
    cost: of a row. cheap: what a row may cost; others are made only of combinations that need one.
    needed: values that a combination may need of other options, some of them or all, to be taken at
        all.
    left: combinations of which no row has been counted yet. refused: those that are refused with
        all other options at their defaults, and with any of `needed`.
    """

    def __init__(
        self,
        options: Mapping[str, Sequence[str]],
        wanted: Iterable[Combination],
        takes: Callable[[Row], bool],
        cost: Callable[[Row], int],
        cheap: int,
        seed: int,
        needed: Sequence[Row] = (),
    ) -> None:
        self.options = options
        self.takes = takes
        self.cost = cost
        self.cheap = cheap
        self.left = set(wanted)
        self.number = len(self.left)
        self.refused: set[Combination] = set()
        self._strengths = {len(combination) for combination in self.left}
        self._dice = random.Random(seed)
        # rows that a combination is put into, nearest to the defaults first
        sizes = range(len(needed) + 1)
        some = chain.from_iterable(combinations(needed, size) for size in sizes)
        defaults = {option: values[0] for option, values in options.items()}
        self._starts = [defaults | dict(ChainMap(*changes)) for changes in some]

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
        entries = [(option, row[option]) for option in self.options]
        for strength in self._strengths:
            self.left.difference_update(combinations(entries, strength))

    def _row_with(self, combination: Combination) -> Row | None:
        """A row that is taken and has the combination; None if there is none even with defaults."""
        for start in self._starts:
            alone = start | dict(combination)
            if self.takes(alone):
                return self._grown(alone, dict(combination))
        return None

    def _grown(self, row: Row, given: Row) -> Row:
        """A row like one that is taken, but for options that are not `given`: each has the value
        with the most new combinations with those decided before that is not refused."""
        most = max(self.cheap, self.cost(row))
        row = dict(row)
        decided = dict(given)
        others = [option for option in self.options if option not in decided]
        self._dice.shuffle(others)
        for option in others:
            values = list(self.options[option])
            self._dice.shuffle(values)
            gains = {value: self._gain(decided, (option, value)) for value in values}
            values.sort(key=gains.__getitem__, reverse=True)
            changed = ({**row, option: value} for value in values)
            taken = (
                one for one in changed if one == row or (self.cost(one) <= most and self.takes(one))
            )
            row = next(taken)
            decided[option] = row[option]
        return row

    def _gain(self, fixed: Row, entry: tuple[str, str]) -> int:
        """How many new combinations an entry has with those that are fixed."""
        option, _ = entry
        before, after = list[tuple[str, str]](), list[tuple[str, str]]()
        side = before
        for name in self.options:
            if name == option:
                side = after
            elif name in fixed:
                side.append((name, fixed[name]))
        gain = 0
        for strength in self._strengths:
            for number in range(strength):
                # a combination has its options in their order
                first = combinations(before, number)
                last = list(combinations(after, strength - 1 - number))
                gain += sum((*one, entry, *other) in self.left for one in first for other in last)
        return gain
