"""Arguments that Megatron-DeepSpeed adds to those of Megatron-LM: its engine, and the configuration
that a script writes or has beside it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaprec.errors import Problem
from megaprec.parsing import parse_json, read_text
from tools.interop.importing.arguments import Arguments
from tools.interop.importing.shell import CommandLine
from tools.interop.importing.shell_words import Word

ENGINE = "deepspeed"
# they choose an engine, or save memory
FLAGS = (ENGINE, "no_pipeline_parallel", "deepspeed_activation_checkpointing", "deepspeed_mpi")
VALUES = ("deepspeed_config", "zero_stage", "num_key_value_heads", "normalization")
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
LARGEST_CONFIG = 256 * 1024  # bytes
# what Megatron-LM's arguments have for a stage of ZeRO
STAGES = {
    "1": ("--use-distributed-optimizer",),
    "2": ("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads"),
    "3": ("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
}


def read_engine(
    command: CommandLine, arguments: Arguments, folder: Path | None
) -> tuple[CommandLine, dict[str, Mapping[str, Any]]]:
    """Return a command line in Megatron-LM's own arguments, and the configuration of DeepSpeed by
    its name. folder: that of the script."""
    typed = {_name(word) for word in command.words}
    if ENGINE not in typed - arguments.dropped:
        return command, {}
    reader = _EngineReader(command, arguments, folder)
    words = list(command.words)
    while words:
        word = words.pop(0)
        name = _name(word)
        if name in arguments.dropped or name not in (*FLAGS, *VALUES):
            reader.left.append(word)
        elif name in FLAGS:
            arguments.unused[name] = word.text
        else:
            reader.take(name, word, words)
    return replace(command, words=reader.left), reader.found


class _EngineReader:
    """Takes the arguments with a value that Megatron-DeepSpeed adds to Megatron-LM's, one by one,
    and translates them into Megatron-LM's own.

    left: the words of the command line so far, translated or as they were. found: configurations of
        DeepSpeed by name.
    """

    def __init__(self, command: CommandLine, arguments: Arguments, folder: Path | None) -> None:
        self.left: list[Word] = []
        self.found: dict[str, Mapping[str, Any]] = {}
        self._arguments = arguments
        self._documents = command.documents
        self._folder = folder
        typed = {_name(word) for word in command.words}
        # then the configuration says what zero_stage would
        self._has_config = "deepspeed_config" in typed - arguments.dropped

    def take(self, name: str, word: Word, following: list[Word]) -> None:
        """Take an argument with its value. following: the words behind it, from which the value is
        taken unless the word has it."""
        _, equals, text = word.text.partition("=")
        has_next = bool(following) and not following[0].text.startswith("--")
        if equals:
            value = replace(word, text=text)
            said = word.text
        elif has_next:
            value = following.pop(0)
            said = f"{word.text} {value.text}"
        else:
            self._arguments.add_problem(word.text, word.place, "a value must follow")
            return
        if name == "deepspeed_config":
            self.found |= _config(value, said, self._documents, self._arguments, self._folder)
        elif name == "zero_stage":
            self.left += _stage(value, said, self._has_config, self._arguments)
        else:
            self.left += _TRANSLATED[name](value)


def _name(word: Word) -> str:
    typed, _, _ = word.text.partition("=")
    return typed.removeprefix("--").replace("-", "_") if typed.startswith("--") else ""


def _groups(value: Word) -> list[Word]:
    """Return Megatron-LM's arguments for heads of keys and values."""
    texts = ("--group-query-attention", "--num-query-groups")
    return [*(Word(text, value.place) for text in texts), value]


def _norm(value: Word) -> list[Word]:
    text = NORMS.get(value.text.lower(), value.text)
    return [Word("--normalization", value.place), replace(value, text=text)]


_TRANSLATED: Mapping[str, Callable[[Word], list[Word]]] = {
    "num_key_value_heads": _groups,
    "normalization": _norm,
}


def _stage(value: Word, said: str, has_config: bool, arguments: Arguments) -> Sequence[Word]:
    """Return what a stage of ZeRO is among Megatron-LM's arguments; nothing if DeepSpeed's
    configuration or the user's key `parallel.zero` counts instead. said: the argument as it was
    given."""
    is_settled = "parallel.zero" in arguments.draft.settled
    if has_config or is_settled or value.text == "0":
        arguments.unused["zero_stage"] = said
    elif value.text in STAGES:
        return [Word(text, value.place) for text in STAGES[value.text]]
    else:
        why = value.unknown or "the stages of ZeRO are 0 to 3"
        arguments.add_problem(said, value.place, why)
    return []


def _config(
    value: Word,
    said: str,
    documents: Mapping[str, str],
    arguments: Arguments,
    folder: Path | None,
) -> dict[str, Mapping[str, Any]]:
    """Return the configuration that the script writes, or that is in its folder."""
    name = Path(value.text).name
    written = {Path(file).name: text for file, text in documents.items()}
    text = documents.get(value.text) or written.get(name)
    if text is None and folder is not None and not value.unknown:
        text = _beside(folder / name)
    if text is None:
        why = value.unknown or Problem(
            "this file is not beside the script: give it too, as another FILE.json"
        )
        arguments.add_problem(said, value.place, why)
        return {}
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        left = re.findall(r"\$\{?\w+\}?|\b[A-Z][A-Z_]{2,}\b", text)
        open_names = f" (left open: {', '.join(dict.fromkeys(left))})" if left else ""
        arguments.add_problem(said, value.place, f"is not JSON{open_names}: {error}")
        return {}
    return {name: content} if isinstance(content, dict) else {}


def _beside(path: Path) -> str | None:
    try:
        return read_text(path, LARGEST_CONFIG)
    except (OSError, ValueError):
        return None
