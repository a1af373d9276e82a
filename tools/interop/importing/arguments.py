"""The arguments that were given to Megatron-LM: on a command line, in a table, or as it keeps them.

A command line is read by the grammar of Megatron-LM's parser: `--name value`, `--name=value`,
flags, and several values up to the next argument. The last one counts if an argument is repeated.
Abbreviations are refused, as Megatron-LM refuses them. Every word is accounted for: it is part of
an argument that is read, of one that is not used here, or of a problem.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaprec.errors import did_you_mean
from tools.convert.megatron.keys import unknown_arguments
from tools.interop.arguments.megatron import (
    DEFAULTS,
    NUMBERS,
    READ,
    REFUSED,
    UNUSED,
    form_of,
    option,
)
from tools.interop.importing.draft import MEGATRON, Draft
from tools.interop.importing.shell import Word

# argparse's own pattern: such a word is a value, and no option
NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
FLAGS = {"true": True, "false": False}
NOT_GIVEN = (None, "", [], ())
# the names under which values are kept, as they are typed; of two the first
TYPED = dict[str, str]()
for _row in READ.values():
    if _row.kept not in READ:
        TYPED.setdefault(_row.kept, _row.name)
# flags that Megatron-LM refuses here, kept under the name of what they turn off
TURNED_OFF = {"perform_initialization": "no_initialization", "data_sharding": "no_data_sharding"}
DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
DTYPES |= {"torch.uint8": "fp8"}


@dataclass
class Arguments:
    """The arguments that were given. values: of those that are read, by the name that Megatron-LM
    keeps them under.

    said: how each of these was given, and place where. unused: arguments that are not used here, as
        they were given.
    dropped: names that are left out because the user says so. left_out: those that were found, as
        they were given.
    tried: the names of all arguments that were given, right or wrong. open: a word of the command
    line may hold arguments that are not known, so none can be called missing.
    """

    dropped: frozenset[str] = frozenset()

    values: dict[str, Any] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    place: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    open: bool = False
    problems: list[str] = field(default_factory=list)

    def get(self, name: str) -> Any:
        """Return the value of an argument, or Megatron-LM's default."""
        return self.values.get(name, DEFAULTS[name])

    def has(self, name: str) -> bool:
        """Return True if an argument was given."""
        return name in self.values

    def origin(self, *names: str) -> str:
        """Return how arguments were given, those of them that were; otherwise that it is
        Megatron-LM's default."""
        given = [self.said[name] for name in names if name in self.said]
        return " ".join(given) or MEGATRON

    def put(self, draft: Draft, key: str, name: str) -> None:
        """Set a key of a run file to the value of an argument, as it is."""
        draft.put(key, self.get(name), self.origin(name))

    def refuse(self, why: str, *names: str) -> None:
        """Add a problem with what these arguments say."""
        places = [self.place[name] for name in names if name in self.place]
        said = [self.said.get(name, option(name)) for name in names]
        self.add_problem(" ".join(said), places[0] if places else "", why)

    def add_problem(self, said: str, place: str, why: str) -> None:
        """Add a problem with something that stands at a place."""
        where = f" ({place})" if place else ""
        self.problems.append(f"{said}{where}: {why}")

    def take(self, name: str, words: Sequence[Word], said: str, place: str) -> None:
        """Add one argument with its values. said: how it was given."""
        self.tried.add(name)
        if name in READ:
            self.tried.add(READ[name].kept)
        unknown = [word.unknown for word in words if word.unknown]
        if name in self.dropped:
            self.left_out[name] = said
        elif name in UNUSED:
            self.unused[name] = said
        elif unknown:
            self.add_problem(said, place, unknown[0])
        elif name in READ:
            self._read(name, [word.text for word in words], said, place)
        elif not _is_permitted(REFUSED[name].permitted, words):
            self.add_problem(said, place, REFUSED[name].why)

    def _read(self, name: str, texts: list[str], said: str, place: str) -> None:
        row = READ[name]
        values = [_typed(text, row.kind) for text in texts]
        if row.form == "flag":
            values = [row.sets]
        elif None in values:
            kind = "a number" if row.kind == "number" else "a whole number"
            self.add_problem(said, place, f"the value must be {kind}")
            return
        elif row.choices and not set(texts) <= set(row.choices):
            choices = ", ".join(row.choices)
            hint = did_you_mean(texts[0], row.choices)
            self.add_problem(said, place, f"the values are {choices}{hint}")
            return
        self.values[row.kept] = tuple(values) if row.form == "values" else values[0]
        self.said[row.kept] = said
        self.place[row.kept] = place


def read_words(words: Sequence[Word], arguments: Arguments) -> None:
    """Add the arguments of a command line. What is wrong is added to their problems."""
    start = 0
    while start < len(words):
        end = start + 1
        while end < len(words) and not _is_option(words[end]):
            end += 1
        start += _read_option(words[start], words[start + 1 : end], arguments)


def _read_option(word: Word, following: Sequence[Word], arguments: Arguments) -> int:
    """Add the argument that a word begins. Returns how many words it takes.

    following: the words up to the next argument.
    """
    typed, equals, text = word.text.partition("=")
    name = typed[2:].replace("-", "_") if typed.startswith("--") else ""
    form = form_of(name)
    if form is None and name not in arguments.dropped:
        arguments.open |= bool(word.unknown) or _is_several(word)
        problem = word.unknown or _why_unknown(word)
        arguments.add_problem(word.text, word.place, problem)
        return 1 + len(following)
    if equals:
        if form == "flag":
            problem = "is a flag, which takes no value"
            arguments.add_problem(word.text, word.place, problem)
        else:
            value = Word(text, word.place, word.unknown)
            arguments.take(name, [value], word.text, word.place)
        return 1
    most_values = {"flag": 0, "value": 1}.get(form or "", len(following))
    values = following[:most_values]
    if form == "value" and not values:
        arguments.add_problem(word.text, word.place, "a value must follow")
    else:
        said = " ".join(given.text for given in (word, *values))
        arguments.take(name, values, said, word.place)
    return 1 + len(values)


def read_table(table: Mapping[str, Any], arguments: Arguments, place: str) -> None:
    """Add the arguments of a table. Names are those typed or those that Megatron-LM keeps; flags
    are true or false.

    A value that is null or empty counts as not given.
    """
    for key, value in table.items():
        kept = key.removeprefix("--").replace("-", "_")
        name = kept if form_of(kept) else TYPED.get(kept, kept)
        if name in arguments.dropped:
            arguments.left_out[name] = f"{key} = {value}"
            arguments.tried.add(name)
        elif value in NOT_GIVEN:
            continue
        elif form_of(name) is None:
            arguments.add_problem(key, place, _why_unknown(Word(option(name))))
        elif form_of(name) != "flag":
            _take_values(name, value, arguments, place)
        elif (switch := FLAGS.get(str(value).lower())) is None:
            arguments.add_problem(f"{key} = {value!r}", place, "is a flag: true or false")
        # under the name that is kept its own value counts
        elif switch if name == kept else switch is READ[name].sets:
            arguments.take(name, [], option(name), place)


def _take_values(name: str, value: Any, arguments: Arguments, place: str) -> None:
    if form_of(name) != "values":
        texts = [str(value)]
    elif isinstance(value, list | tuple):
        texts = [str(item) for item in value]
    else:
        texts = str(value).split()
    said = " ".join([option(name), *texts])
    arguments.take(name, [Word(text, place) for text in texts], said, place)


def read_kept(args: Mapping[str, Any], arguments: Arguments, place: str) -> list[str]:
    """Add all arguments as Megatron-LM keeps them, which its log and its checkpoints show. Returns
    notes.

    A value that is Megatron-LM's default counts as not given, but for its origin.
    """
    known = _known_of_kept(args)
    read_table(known, arguments, place)
    for name in DEFAULTS.keys() & args.keys():
        value = args[name]
        if value not in NOT_GIVEN:
            arguments.said.setdefault(name, f"{name} = {value}")
        is_from_here = arguments.place.get(name) == place
        if is_from_here and arguments.get(name) == DEFAULTS[name]:
            arguments.values.pop(name, None)
    # the log has hundreds of them: their number is enough
    unused = [name for name in known if arguments.unused.pop(name, None)]
    arguments.unused[place] = f"{len(unused)} other arguments of {place}"
    strange = list[str]()
    for text in unknown_arguments(args):
        name, _, _ = text.partition(" ")
        if form_of(name) is None:
            strange.append(text)
    if not strange:
        return []
    return [
        f"{place}: no argument of Megatron-LM is known here, and not read: {', '.join(strange)}"
    ]


def _known_of_kept(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that are known, without what Megatron-LM itself adds."""
    table = dict[str, Any]()
    for name, value in args.items():
        if name in TURNED_OFF:
            table[TURNED_OFF[name]] = not value
        else:
            table[name] = value
    for name in ("start_weight_decay", "end_weight_decay"):
        if table.get(name) == table.get("weight_decay"):  # so Megatron-LM completes them
            table.pop(name, None)
    if table.get("vocab_size") or table.get("tokenizer_model"):
        table.pop("padded_vocab_size", None)  # it counts rows that no token has
    known = dict[str, Any]()
    for name, value in table.items():
        if name in TYPED or form_of(name):
            known[name] = DTYPES.get(str(value), value)
    return known


def is_known(name: str) -> bool:
    """Return True if Megatron-LM has the argument, typed with dashes or not, or keeps a value under
    the name."""
    word = name.replace("-", "_")
    return word in TYPED or form_of(word) is not None


def _is_option(word: Word) -> bool:
    text = word.text
    if NEGATIVE.match(text) or " " in text:
        return False
    return text.startswith("-") and text != "-"


def _is_several(word: Word) -> bool:
    """Return True for one word that begins like an option and has a space: arguments that quotes
    hold together."""
    return word.text.lstrip().startswith("--") and " " in word.text.strip()


def _why_unknown(word: Word) -> str:
    if _is_several(word):
        return (
            'quotes make one word of several arguments: write "${NAME[@]}" for an array, and '
            "$NAME without quotes"
        )
    if not word.text.startswith("-"):
        return "no argument takes this value"
    name, _, _ = word.text.partition("=")
    options = map(option, (*READ, *UNUSED, *REFUSED))
    hint = did_you_mean(name, options)
    return f"no such argument of Megatron-LM is known here{hint}"


def _typed(text: str, kind: str) -> Any:
    """Return a value of a kind; None if the text is none."""
    if kind not in NUMBERS:
        return text
    try:
        number = NUMBERS[kind](text) if len(text) < 100 else None
    except ValueError:
        return None
    is_nan = number != number
    # whole numbers of a TOML file have 64 bits
    if number is None or is_nan or abs(number) >= 2**63:
        return None
    return number


def _is_permitted(permitted: str | None, words: Sequence[Word]) -> bool:
    """Return True if the values are the permitted one."""
    if permitted is None or len(words) != 1:
        return False
    number = _typed(permitted, "number")
    text = words[0].text
    return text == permitted or (number is not None and _typed(text, "number") == number)
