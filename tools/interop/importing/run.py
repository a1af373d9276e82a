"""From what was given to the run file: the parts put together, and the result checked as `megaprec
train` checks it."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaprec.durable import put_text
from megaprec.errors import UserError
from megaprec.scratch import scratch_folder
from tools.config.resolved_run import resolve_run
from tools.config.run_file import load_precision, tables_of_a_run
from tools.config.tables.native_keys import native_keys_of
from tools.console.toml import Setting, toml
from tools.interop.foreign.read import read_foreign
from tools.interop.foreign.whose import OF_NEMO, OF_NEOX
from tools.interop.importing.accelerate import add_accelerate, add_half_of_accelerate
from tools.interop.importing.arguments import Arguments
from tools.interop.importing.deepspeed import add_deepspeed
from tools.interop.importing.draft import DEEPSPEED, MEGATRON, Draft
from tools.interop.importing.megatron_data import add_data, add_run
from tools.interop.importing.megatron_layout import add_layout
from tools.interop.importing.megatron_model import add_model
from tools.interop.importing.megatron_training import (
    add_length,
    add_optimizer,
    add_precision,
    add_rate,
)
from tools.interop.importing.nemo import from_nemo
from tools.interop.importing.neox import from_neox
from tools.interop.importing.renamed import Renamed, add_renamed
from tools.interop.importing.sources import Sources, read_sources
from tools.interop.importing.torchtitan import add_torchtitan
from tools.interop.importing.trainer import add_trainer

OURS = "megaprec's default"
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# refused arguments that would say what another lacks
INSTEAD = {
    "--data-path": ("--mock-data", "--train-data-path", "--data-args-path"),
    "--vocab-size": ("--tokenizer-model", "--padded-vocab-size"),
}
KEY = re.compile(r"\w+\.\w+")
# keys that change no number of the training
WITHOUT_NUMBERS = (
    "parallel.",
    "log.",
    "checkpoint.",
    "train.eval_",
)


@dataclass(frozen=True)
class Imported:
    """A run file. read and unused: how many arguments it was made of, and how many have no meaning
    here."""

    text: str
    notes: tuple[str, ...]
    read: int
    unused: int


def import_run(
    items: Sequence[str],
    settled: Mapping[str, Setting],
    assumed: Mapping[str, str],
    ranks: int | None,
    dropped: frozenset[str] = frozenset(),
) -> Imported:
    """Return the run file of a command line, script, YAML or DeepSpeed's JSON.

    settled: keys that the user gives beside them, which count. assumed: values of a script's
    variables. ranks: how many there are; None: as a launcher in the script says. dropped: arguments
    of Megatron-LM to leave out, by name. Raises UserError with all problems.
    """
    draft = Draft(settled)
    arguments = Arguments(dropped, draft)
    sources = read_sources(items, assumed, arguments)
    added = _add_systems(sources, arguments, ranks)
    for key, entry in settled.items():
        draft.put(key, entry.value, "given beside the arguments")
    _tell_left_out(arguments)
    if not (sources.megatron or sources.trainer or sources.torchtitan):
        _add_defaults(draft)
    _note_defaults(draft)
    notes = list(dict.fromkeys([*sources.notes, *draft.notes]))
    problems = [*draft.problems, *_surely_missing(draft)]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    unused = dict(arguments.unused)
    num_read = len(arguments.values)
    for of_system in added:
        unused |= of_system.unused
        num_read += of_system.num_read
    text = draft.text(notes, [*unused.values()], " and ".join(sources.names))
    _check(draft, text, sources)
    return Imported(text, tuple(notes), num_read, len(unused))


@dataclass(frozen=True)
class _Added:
    """The arguments that were added to a draft. unused: those that have no meaning here, as they
    were given. num_read: how many of the others there are. ranks: that they say."""

    unused: Mapping[str, str]
    num_read: int
    ranks: int | None = None


def _add_systems(sources: Sources, arguments: Arguments, ranks: int | None) -> Sequence[_Added]:
    """Add the settings of each system that was read, a system before those that it may name; return
    what was added of each."""
    draft = arguments.draft
    ranks = ranks or sources.ranks
    accelerate = _add_accelerate(sources, draft)
    ranks = ranks or accelerate.ranks
    made = _add_renamed(sources, arguments, ranks)
    if made is not None:
        ranks = ranks or made.ranks
    if sources.megatron:
        _add_megatron(arguments, ranks)
    if made is not None:
        _put_own_keys(made, sources, draft)
        if made.deepspeed:
            sources.deepspeed[" and ".join(sources.names)] = made.deepspeed
    torchtitan = _add_torchtitan(sources, arguments, ranks)
    trainer = _add_trainer(sources, arguments, ranks)
    if (sources.accelerate or sources.trainer) and not sources.deepspeed:
        add_half_of_accelerate(draft)
    deepspeed = _add_deepspeed(sources, draft, ranks)
    return (accelerate, torchtitan, trainer, deepspeed)


def _add_megatron(arguments: Arguments, ranks: int | None) -> None:
    """Add the arguments of Megatron-LM."""
    add_model(arguments)
    add_layout(arguments, ranks)
    add_length(arguments)
    add_rate(arguments)
    add_optimizer(arguments)
    add_precision(arguments)
    add_data(arguments)
    add_run(arguments)


def _add_accelerate(sources: Sources, draft: Draft) -> _Added:
    """Add configurations of accelerate, which may have or name one of DeepSpeed; return what was
    added."""
    unused: dict[str, str] = {}
    num_read = 0
    ranks: int | None = None
    for path, content in sources.accelerate.items():
        config = add_accelerate(content, path, draft)
        unused |= config.unused
        num_read += len(config.values)
        ranks = ranks or config.ranks
        sources.deepspeed |= config.deepspeed
    return _Added(unused, num_read, ranks)


def _add_torchtitan(sources: Sources, arguments: Arguments, ranks: int | None) -> _Added:
    """Add the settings of torchtitan; return what was added."""
    if not sources.torchtitan:
        return _Added({}, 0)
    settings = add_torchtitan(sources.torchtitan, arguments.draft, ranks, arguments.dropped)
    arguments.left_out |= settings.left_out
    return _Added(settings.unused, len(settings.values))


def _add_trainer(sources: Sources, arguments: Arguments, ranks: int | None) -> _Added:
    """Add the arguments of Hugging Face's Trainer, which may name a configuration of DeepSpeed;
    return what was added."""
    if not sources.trainer:
        return _Added({}, 0)
    draft = arguments.draft
    settings, deepspeed = add_trainer(
        sources.trainer, draft, ranks, arguments.dropped, sources.folder, sources.documents
    )
    arguments.left_out |= settings.left_out
    sources.deepspeed |= deepspeed
    draft.fills_auto = True
    return _Added(settings.unused, len(settings.said) - len(settings.unused))


def _add_deepspeed(sources: Sources, draft: Draft, ranks: int | None) -> _Added:
    """Add the configurations of DeepSpeed; return what was added."""
    unused: dict[str, str] = {}
    num_read = 0
    for place, content in sources.deepspeed.items():
        unused_here = add_deepspeed(content, place, draft, ranks)
        unused |= unused_here
        num_read += _num_leaves(content) - len(unused_here)
    return _Added(unused, num_read)


def _tell_left_out(arguments: Arguments) -> None:
    """Note what --drop leaves out; it is a problem if it is not there."""
    draft = arguments.draft
    for name in sorted(arguments.dropped - arguments.left_out.keys()):
        draft.problems.append(f"--drop {name}: no such argument is given: leave this --drop out")
    for said in arguments.left_out.values():
        draft.notes.append(f"left out, as --drop says: {said}")


def _add_renamed(sources: Sources, arguments: Arguments, ranks: int | None) -> Renamed | None:
    """Add settings under names of their own to the arguments, and return them; None without any."""
    if not sources.renamed:
        return None
    for name in arguments.dropped & sources.renamed.keys():
        arguments.left_out[name] = f"{name} = {sources.renamed.pop(name)!r}"
    translate = from_neox if sources.system == OF_NEOX else from_nemo
    made = translate(sources.renamed, ranks)
    add_renamed(made, arguments, " and ".join(sources.names))
    sources.megatron = True
    return made


def _put_own_keys(made: Renamed, sources: Sources, draft: Draft) -> None:
    """Set the keys that Megatron-LM's arguments cannot say. The precision of NeMo is that of its
    dialect."""
    origin = f"as {made.system} has it"
    if sources.system == OF_NEMO:
        for key in [*draft.keys]:
            if key.startswith(("precision.", "fp8.")):
                del draft.keys[key]
        for key, value in _precision_of(sources.renamed_files).items():
            if value != _default(key):
                draft.put(key, value, origin)
    for key, value in made.keys.items():
        draft.put(key, value, origin)


def _precision_of(files: Sequence[Path]) -> dict[str, Any]:
    """Return the keys of a run file that say the precision of a configuration. Raises
    UserError."""
    keys = dict[str, Any]()
    for file in files:
        foreign = read_foreign(file, {})
        plan, _, _ = load_precision(dict(foreign.given))
        keys |= native_keys_of(plan)
    return keys


def _surely_missing(draft: Draft) -> Iterator[str]:
    """Yield what is missing, unless it may stand in an argument that is refused or in a word that
    is not known."""
    refused = set[str]()
    for problem in draft.problems:
        said, _, _ = problem.partition(":")
        names = OPTION.findall(said)
        if not names and not said.startswith("--"):
            return
        refused.update(names)
    for problem in draft.missing:
        named = {*OPTION.findall(problem)}
        needed = {other for name in named for other in (name, *INSTEAD.get(name, ()))}
        if not needed & refused:
            yield problem


def _add_defaults(draft: Draft) -> None:
    """State our defaults that stand in for an optimizer, a schedule and data that no file names."""
    keys = ["lr.peak", "optimizer.name", "optimizer.weight_decay", "optimizer.clip"]
    if draft.value("optimizer.name", "adamw") == "adamw":
        keys += ["optimizer.betas", "optimizer.eps"]
    if draft.value("lr.schedule") is None:
        keys += ["lr.schedule", "lr.warmup", "lr.final"]
    if draft.value("data.blend") is None:
        keys.append("data.source")
    for key in keys:
        if key not in draft.keys:
            draft.put(key, _default(key), OURS)


def _note_defaults(draft: Draft) -> None:
    """Note the defaults that stand in for what the files leave open: other systems' where they
    differ from ours."""
    for source in (MEGATRON, DEEPSPEED, OURS):
        standing_in = list[str]()
        for key, entry in draft.keys.items():
            if entry.origin != source or key.startswith(WITHOUT_NUMBERS):
                continue
            value = tuple(entry.value) if isinstance(entry.value, list) else entry.value
            if source == OURS or value != _default(key):
                standing_in.append(f"{key} = {toml(entry.value)}")
        if standing_in:
            draft.notes.append(f"left open, so {source} counts: {', '.join(standing_in)}")


def _default(key: str) -> Any:
    """Return megaprec's default of a dotted key."""
    table, _, name = key.partition(".")
    return tables_of_a_run()[table].model_fields[name].default


def _num_leaves(content: object) -> int:
    """Return the number of values in a table and the tables in it; an empty table is one."""
    if isinstance(content, dict) and content:
        return sum(map(_num_leaves, content.values()))
    return 1


def _check(draft: Draft, text: str, sources: Sources) -> None:
    """Raise UserError unless a run can be read from the text. Weights to begin with need not be
    there yet."""
    weights = draft.keys.get("train.init_from")
    lines = text.splitlines()
    if weights is not None and not os.path.exists(os.path.expanduser(str(weights.value))):
        lines = [line for line in lines if not line.startswith("init_from = ")]
        if "[model]" not in lines:
            lines += _stand_in(draft)
    with scratch_folder("import") as folder:
        path = Path(folder) / "run.toml"
        put_text(path, "\n".join(lines))
        try:
            resolve_run(path)
        except UserError as error:
            problems = list[str]()
            for problem in error.problems:
                line = problem.replace(f"file {path}", "imported")
                problems.append(f"{_arguments_behind(line, draft)}{line}")
            if not (sources.megatron or sources.trainer or sources.torchtitan):
                problems += _ways_to_the_rest(draft, sources)
            raise UserError(*problems) from error


def _ways_to_the_rest(draft: Draft, sources: Sources) -> Iterator[str]:
    """Yield the line on what a configuration that says nothing of model and length needs beside,
    unless all of it is given."""
    has_model = any(key.startswith(("model.", "train.init_from")) for key in draft.settled)
    examples = [] if has_model else ["model.preset=llama-2-7b"]
    for key, number in (("train.steps", 1000), ("train.seq_length", 4096)):
        if draft.value(key) is None:
            examples.append(f"{key}={number}")
    if not examples:
        return
    whose = "accelerate" if sources.accelerate else "DeepSpeed"
    others = "Hugging Face's Trainer" if sources.accelerate else "Megatron-LM"
    yield (
        f"{whose}'s configuration says nothing of model, data and length: give the arguments of "
        f"{others} too, or keys such as {' '.join(examples)}"
    )


def _stand_in(draft: Draft) -> list[str]:
    """Return a model in the place of one that is in a folder which is not there."""
    length = draft.value("train.seq_length")
    return ["[model]", 'preset = "llama-demo"', f"max_positions = {length}"]


def _arguments_behind(problem: str, draft: Draft) -> str:
    """Return the arguments that gave the key with which a problem begins, to stand before it; empty
    if none did."""
    key = KEY.match(problem)
    entry = draft.keys.get(key[0]) if key else None
    if entry is None or not entry.origin.startswith("--"):
        return ""
    return f"{entry.origin}: "
