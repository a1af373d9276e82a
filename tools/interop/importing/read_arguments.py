"""Reading of Megatron-LM's arguments: from a command line, from a table, or as it keeps them.

A command line is read by the grammar of Megatron-LM's parser: `--name value`, `--name=value`,
flags, and several values up to the next argument. The last one counts if an argument is repeated.
Abbreviations are refused, as Megatron-LM refuses them. Every word is accounted for: it is part of
an argument that is read, of one that is not used here, or of a problem.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from megaprec.errors import did_you_mean
from tools.console.units import counted
from tools.convert.megatron.keys import unknown_arguments
from tools.interop.arguments.megatron import (
    DEFAULTS,
    OF_OTHERS,
    READ,
    REFUSED,
    UNUSED,
    UNUSED_FORMS,
    form_of,
    is_unused,
    option,
)
from tools.interop.importing.arguments import Arguments
from tools.interop.importing.shell_words import Word, joined_texts

# argparse's own pattern: such a word is a value, and no option
NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
FLAGS = {"true": True, "false": False}
NOT_GIVEN = (None, "", [], ())
# flags that Megatron-LM refuses here, kept under the name of what they turn off
TURNED_OFF = {
    "perform_initialization": "no_initialization",
    "data_sharding": "no_data_sharding",
}
# functions of a feed-forward, and the flags that choose them
ACTIVATIONS: Mapping[str, Mapping[str, bool]] = {
    "swiglu": {"swiglu": True},
    "squaredrelu": {"squared_relu": True},
    "gelu": {},
}
DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.uint8": "fp8",
}


def _typed_names() -> dict[str, str]:
    """Return, by the name that a value is kept under, the name that is typed; of two the first."""
    typed: dict[str, str] = {}
    for row in READ.values():
        if row.kept not in READ:
            typed.setdefault(row.kept, row.name)
    return typed


TYPED = _typed_names()


def read_words(words: Sequence[Word], arguments: Arguments) -> None:
    """Add the arguments of a command line. What is wrong is added to their problems."""
    unread = list(words)
    while unread:
        word, *others = unread
        following = list(takewhile(_is_value, others))
        num_taken = _read_option(word, following, arguments)
        unread = others[num_taken:]


def _read_option(word: Word, following: Sequence[Word], arguments: Arguments) -> int:
    """Add the argument that a word begins. Returns how many of the words behind it are its own.

    following: the words up to the next argument.
    """
    typed, equals, text = word.text.partition("=")
    name = _name_of_option(typed)
    form = form_of(name)
    if form is None and name not in arguments.dropped:
        why = word.unknown or _why_unknown(word.text)
        arguments.add_problem(word.text, word.place, why)
        return len(following)
    if equals:
        value = replace(word, text=text)
        _read_joined(name, value, word, arguments)
        return 0
    values = _values_of(name, following)
    others = following[len(values) :]
    strays = list(takewhile(_is_known_word, others))
    said = joined_texts([word, *values])
    if form == "value" and not values:
        arguments.add_problem(word.text, word.place, "a value must follow")
    elif strays and name not in arguments.dropped:
        more = joined_texts(strays)
        takes = "one value" if form == "value" else "no value"
        arguments.add_problem(f"{said} {more}", word.place, f"the argument takes {takes}")
    else:
        arguments.take(name, values, said, word.place)
    return len(values) + len(strays)


def _read_joined(name: str, value: Word, word: Word, arguments: Arguments) -> None:
    """Add an argument that is typed as `--name=value`, which is one word."""
    if form_of(name) == "flag":
        arguments.add_problem(word.text, word.place, "is a flag, which takes no value")
    else:
        arguments.take(name, [value], word.text, word.place)


def _values_of(name: str, following: Sequence[Word]) -> Sequence[Word]:
    """Return those of the words behind an argument that are its values."""
    form = form_of(name)
    if form == "flag":
        return []
    if form == "value":
        return following[:1]
    if is_unused(name):  # it may be a flag, and an unknown word further arguments
        form = UNUSED_FORMS.get(name) or OF_OTHERS.get(name)
        if form == "values":
            return following
        num_sure = 1 if form == "value" else 0
        return [*following[:num_sure], *takewhile(_is_known_word, following[num_sure:])]
    return following


def _name_of_option(typed: str) -> str:
    """Return the name of an argument as Megatron-LM keeps it; "" for what is no option."""
    return typed.removeprefix("--").replace("-", "_") if typed.startswith("--") else ""


def _is_known_word(word: Word) -> bool:
    return word.unknown is None


def read_table(table: Mapping[str, Any], arguments: Arguments, place: str) -> None:
    """Add the arguments of a table. Names are those typed or those that Megatron-LM keeps; flags
    are true or false.

    A value that is null or empty counts as not given.
    """
    for key, value in _on_and_off(table).items():
        kept = key.removeprefix("--").replace("-", "_")
        name = _name_in_table(kept)
        is_off = _switch(value) is False and is_unused(name)
        if value in NOT_GIVEN or is_off:
            continue
        if _is_off_by_itself(name, value):
            arguments.unused[name] = f"{option(name)} {value}"
        elif form_of(name) == "flag":
            _read_flag(key, kept, value, arguments, place)
        elif form_of(name) == "value":
            typed = f"{option(name)}={value}"
            read_words([Word(typed, place)], arguments)
        else:
            typed = Word(option(name), place)
            read_words([typed, *_words_of(value, place)], arguments)


def _switch(value: Any) -> bool | None:
    """Return what a value says of a flag; None if it is neither true nor false."""
    return FLAGS.get(str(value).lower())


def _is_off_by_itself(name: str, value: Any) -> bool:
    """Return True for what no one knows and is off, and for what --no-NAME would turn off, which
    is not used here."""
    if form_of(name) is not None:
        return False
    switch = _switch(value)
    return switch is False or (switch is True and is_unused(f"no_{name}"))


def _read_flag(key: str, kept: str, value: Any, arguments: Arguments, place: str) -> None:
    """Add a flag of a table. kept: the name in the table, without dashes."""
    switch = _switch(value)
    if switch is None:
        arguments.add_problem(f"{key} = {value!r}", place, "is a flag: true or false")
        return
    name = _name_in_table(kept)
    # under the name that is kept its own value counts
    is_given = switch if name == kept else switch is READ[name].sets
    if is_given:
        read_words([Word(option(name), place)], arguments)


def _on_and_off(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table in which what stands for the flag of another name is that flag."""
    plain = dict(table)
    for kept, flag in TURNED_OFF.items():
        if isinstance(plain.get(kept), bool):
            plain[flag] = not plain.pop(kept)
    activation = plain.get("activation_func")
    if isinstance(activation, str) and activation in ACTIVATIONS:
        del plain["activation_func"]
        plain |= ACTIVATIONS[activation]
    return plain


def _words_of(value: Any, place: str) -> list[Word]:
    """Return the words of an argument that may take several."""
    texts = value if isinstance(value, list | tuple) else str(value).split()
    return [Word(str(text), place) for text in texts]


def _name_in_table(kept: str) -> str:
    """Return the name as it is typed."""
    return kept if form_of(kept) else TYPED.get(kept, kept)


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
            del arguments.values[name]
    # the log has hundreds of them: their number is enough
    num_unused = 0
    for name in known:
        if name in arguments.unused:
            del arguments.unused[name]
            num_unused += 1
    arguments.unused[place] = f"{counted(num_unused, 'further argument')} of {place}"
    strange = list[str]()
    for text in unknown_arguments(args):
        name, _, _ = text.partition(" ")
        if form_of(name) is None:
            strange.append(text)
    if not strange:
        return []
    listed = ", ".join(strange)
    return [f"{place}: no argument of Megatron-LM is known here, and not read: {listed}"]


def _known_of_kept(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that are known, without what Megatron-LM itself adds."""
    table = dict(args)
    for name in ("start_weight_decay", "end_weight_decay"):
        if table.get(name) == table.get("weight_decay"):  # so Megatron-LM completes them
            table.pop(name, None)
    if table.get("vocab_size") or table.get("tokenizer_model"):
        table.pop("padded_vocab_size", None)  # it counts rows that no token has
    if table.get("step_batch_size_schedule"):  # beside which no other batch is given
        table.pop("global_batch_size", None)
    known = dict[str, Any]()
    for name, value in table.items():
        if is_known(name) or name in TURNED_OFF:
            known[name] = DTYPES.get(str(value), value)
    return known


def is_known(name: str) -> bool:
    """Return True if Megatron-LM has the argument, typed with dashes or not, or keeps a value under
    the name."""
    word = name.replace("-", "_")
    return word in TYPED or form_of(word) is not None


def _is_value(word: Word) -> bool:
    """Return True for a word that begins no argument, as argparse decides it."""
    text = word.text
    is_dashed = text.startswith("-") and text != "-"
    return not is_dashed or " " in text or NEGATIVE.match(text) is not None


def _why_unknown(text: str) -> str:
    """Return what is wrong with a word that is no argument of Megatron-LM."""
    if not text.startswith("-"):
        return "no argument takes this value"
    if " " in text:
        return 'quotes make one word of several arguments: write "${NAME[@]}", or $NAME bare'
    name, _, _ = text.partition("=")
    options = map(option, (*READ, *UNUSED, *REFUSED))
    return f"no such argument of Megatron-LM is known here{did_you_mean(name, options)}"
