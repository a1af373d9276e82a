"""A trained model in one process, from a folder of any format, with the tokens that begin and end
its documents.

Models differ in what stands before a document. Some have a begin token, others have seen the end
token of the document before. A run's checkpoint has recorded which it was trained with; otherwise
the folder's config.json says it; if neither does, it is the tokenizer's end token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.atomic import checkpoint_at
from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.reader import Store
from megaprec.comm.axis import Axis
from megaprec.durable import read_whole
from megaprec.errors import UserError
from megaprec.optim.state.flat_buffer import EMA
from megaprec.precision.plan import plan
from megaprec.text.tokenizer import Tokenizer, load_tokenizer
from megaprec.tokens.places import is_remote
from models.config import ModelConfig, require_builtin
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from parallel.context import Context
from tools.convert.averaged import averaged
from tools.convert.core.source import Source
from tools.convert.formats import FORMATS
from tools.convert.hf.notes import KEPT
from tools.convert.hf.vocabulary import check_tokenizer, folder_notes, main_file, stated_ids
from tools.convert.initial import open_weights
from tools.convert.verify import read_weights
from tools.saved.train_state import find_checkpoint, read_model, tokenizer_files

S = TypeVar("S", bound=Stage)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class DescribedModel:
    """A model as its folder describes it, without its weights.

    begin: id of the token before a document, if any.
    ends: ids that end a document.
    notes: lines for the user on what is not followed.
    generation: contents of generation_config.json.
    prompt_begin: id of the token before a prompt, if any.
    """

    config: ModelConfig
    tokenizer: Tokenizer | None
    begin: int | None
    ends: frozenset[int]
    notes: tuple[str, ...] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)
    prompt_begin: int | None = None


@dataclass(frozen=True, kw_only=True)
class LoadedModel(DescribedModel, Generic[S]):
    """A model with its weights.

    device: that of the stage.
    """

    stage: S
    device: torch.device = CPU


def describe_model(
    path: Path, tokenizer: Path | None, ema: bool, tensor: int, pipeline: int
) -> DescribedModel:
    """Return what a folder says of its model, in a moment, for no weight is read.

    tokenizer: file to use in place of the folder's own.
    ema: the average of its weights is wanted.
    tensor, pipeline: ranks that are to share the model.
    Raises UserError as `load_model` does, but not for damaged files.
    """
    _require_model(path)
    described = _describe(_source(path, ema), tokenizer)
    require_layout(described.config, tensor, pipeline)
    return described


def load_model(
    path: Path,
    stage_class: type[S],
    compute: str = "fp32",
    tokenizer: Path | None = None,
    mesh: DeviceMesh | None = None,
    ema: bool = False,
    device: torch.device = CPU,
) -> LoadedModel[S]:
    """Return the model, whatever format, layout and precision the folder has. Raises UserError.

    stage_class: of the stage that holds it.
    compute: precision, as in precision.compute.
    tokenizer: file to use in place of the folder's own.
    mesh: the layout of the ranks, each of which reads what it holds of the stage of its pipeline
        rank; None: the whole model is on this process.
    ema: the model has the moving average of the weights, which the folder must keep.
    device: of the stage. Weights are read to the CPU first.
    """
    source = _open(path, ema)
    described = _describe(source, tokenizer)
    stage = _load_stage(source, stage_class, compute, mesh).to(device)
    return LoadedModel(**vars(described), stage=stage, device=device)


def _describe(source: Source, tokenizer_file: Path | None) -> DescribedModel:
    """Return what a source says of its model. tokenizer_file: to use in place of its own."""
    tokenizer = _choose_tokenizer(source, tokenizer_file)
    return DescribedModel(
        source.model.without_mtp,
        tokenizer,
        _begin(source, tokenizer),
        _ends(source, tokenizer),
        tuple(_notes(source, tokenizer, tokenizer_file)),
        source.facts.generation,
        _prompt_begin(source, tokenizer),
    )


def _choose_tokenizer(source: Source, file: Path | None) -> Tokenizer | None:
    """Return the tokenizer of a file, or the folder's own; None if there is none."""
    if file:
        tokenizer = load_tokenizer(file)
    else:
        tokenizer = check_tokenizer(source.tokenizer, source.model.vocab)
    if tokenizer and tokenizer.vocab_size > source.model.vocab:
        raise UserError.of(
            "text.tokenizer_too_large",
            path=tokenizer.path,
            vocab_size=tokenizer.vocab_size,
            vocab=source.model.vocab,
        )
    return tokenizer


def _load_stage(source: Source, stage_class: type[S], compute: str, mesh: DeviceMesh | None) -> S:
    """Return this rank's stage with its weights."""
    # Modules of multi-token prediction serve training alone; weights are read, not drawn.
    config = source.model.without_mtp.with_zero_weights
    pp = Axis.of(mesh, "pp")
    tp = Axis.of(mesh, "tp")
    require_layout(config, tp.size, pp.size)
    cut = cuts(config, pp.size, config.max_positions)[pp.rank]
    # The last stage has a copy of the embedding as its head.
    tied_stages = (0, pp.size - 1) if config.tied and pp.size > 1 else ()
    stage = stage_class(config, Context(plan(compute), tp), cut, tied_stages)
    read_weights(stage, source)
    return stage


def _notes(source: Source, tokenizer: Tokenizer | None, file: Path | None) -> Iterator[str]:
    """Yield lines on what is not followed. file: of the tokenizer, if it is not the folder's."""
    for note in source.facts.notes:
        if not note.endswith(KEPT):  # `_notes_on_ids` says what comes of these
            yield note
    yield from folder_notes(source.path, source.tokenizer)
    if tokenizer:
        yield from tokenizer.notes
    yield from _notes_on_ids(source, tokenizer)
    own_file = main_file(source.tokenizer)
    if file and own_file and read_whole(own_file) != read_whole(file):
        yield (
            f"{file} is used, not {own_file}, which the model was trained with: their tokens "
            "must mean the same"
        )


def require_layout(model: ModelConfig, tensor: int, pipeline: int) -> None:
    """Raise UserError, with the options of the command, for a layout that the model cannot have."""
    widths = model.ffn_widths.values()
    kv_heads = (model.kv_heads, model.global_kv_heads or model.kv_heads)
    divides_heads = model.heads % tensor == 0 and model.divides_recurrence(tensor)
    # fewer key-value heads than ranks are copied
    divides_kv_heads = all(count % tensor == 0 or tensor % count == 0 for count in kv_heads)
    divides_widths = all(width % tensor == 0 for width in widths)
    problems = []
    if not divides_heads or not divides_widths or not divides_kv_heads:
        features = " and ".join(map(str, widths))
        sizes = (
            f"{model.heads} heads, {model.kv_heads} kv heads and {features} features of the "
            "feed-forward"
        )
        if model.global_kv_heads:
            sizes += f" and {model.global_kv_heads} global kv heads"
        if model.mamba:
            sizes += f" and {model.mamba.groups} groups of model.mamba"
        problems.append(
            f"--tensor {tensor} does not divide the model's {sizes} evenly: give another number"
        )
    if pipeline > model.layers:
        problems.append(
            f"--pipeline {pipeline}: the model has {model.layers} layers; give at most as "
            "many stages"
        )
    if problems:
        raise UserError(*problems)


def _open(path: Path, ema: bool) -> Source:
    """Open a folder, for the average of its weights if `ema` is True. Raises UserError if its files
    are damaged, if it keeps no average, or if it holds no model of a built-in family."""
    _require_model(path)
    if checkpoint := checkpoint_at(path):
        store = Store(checkpoint)
        read_files = store.files_of("weight")
        # a loop of the user's own saves none
        if "tokenizer" in store.index:
            read_files |= {*tokenizer_files(store)}
        if ema:
            read_files |= store.files_of(EMA)
        require_intact(store, read_files)
    return _source(path, ema)


def _source(path: Path, ema: bool) -> Source:
    """Return the weights of a folder, or the average that it keeps of them. Raises UserError."""
    source = open_weights(path)
    return averaged(source) if ema else source


def _require_model(path: Path) -> None:
    """Raise UserError unless a folder has a model of a built-in family."""
    is_folder = not is_remote(path) and path.is_dir()
    has_model = is_folder and any(known_format.find(path) for known_format in FORMATS.values())
    if not has_model:
        find_checkpoint(path)  # raises if there is none, and says what the folder lacks
    if checkpoint := checkpoint_at(path):
        require_builtin(read_model(Store(checkpoint)), "text from a checkpoint")


def _begin(source: Source, tokenizer: Tokenizer | None) -> int | None:
    """Return the id of the token before documents in the training of the model.

    A run of ours has recorded it. A config.json names it; if it names an end token alone, that is
    what stands before a document, and if it names neither, there is none.
    """
    facts = source.facts
    if facts.documents:
        return facts.documents["begin"]
    begins = stated_ids(facts.special, "bos_token_id", _count_ids(source, tokenizer))
    if begins:
        return begins[0]
    names_no_end = "eos_token_id" in facts.special and facts.special["eos_token_id"] is None
    if tokenizer is None or names_no_end:
        return None
    return tokenizer.eos


def _prompt_begin(source: Source, tokenizer: Tokenizer | None) -> int | None:
    """Return the id of the token before a prompt: that before documents, but none where a
    config.json names no begin token, as in transformers."""
    facts = source.facts
    names_none = "bos_token_id" in facts.special and facts.special["bos_token_id"] is None
    if names_none and not facts.documents:
        return None
    return _begin(source, tokenizer)


def _ends(source: Source, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the ids that end a document: those of config.json, of generation_config.json and of
    the tokenizer."""
    count = _count_ids(source, tokenizer)
    ends = set(stated_ids(source.facts.special, "eos_token_id", count))
    ends.update(stated_ids(source.facts.generation, "eos_token_id", count))
    if tokenizer is not None and tokenizer.eos is not None:
        ends.add(tokenizer.eos)
    return frozenset(ends)


def _count_ids(source: Source, tokenizer: Tokenizer | None) -> int:
    """Return the number of ids that a token may have."""
    if tokenizer:
        return min(source.model.vocab, tokenizer.vocab_size)
    return source.model.vocab


def _notes_on_ids(source: Source, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield a note for each id that is said to begin or end a document, but that no token has. -1
    stands for none."""
    facts = source.facts
    count = _count_ids(source, tokenizer)
    tables = (
        ("bos_token_id", facts.special, ""),
        ("eos_token_id", facts.special, ""),
        ("eos_token_id", facts.generation, " of generation_config.json"),
    )
    for key, table, where in tables:
        followed = stated_ids(table, key, count)
        value = table.get(key)
        stated = value if isinstance(value, list) else [value]
        strange = [token for token in stated if token not in (*followed, None, -1)]
        if strange:
            yield (
                f"{source.path}: {key} = {strange[0]!r}{where} is not followed: no token has this "
                "number"
            )
        if key == "bos_token_id" and len(followed) > 1:
            yield (
                f"{source.path}: {key} has {len(followed)} tokens: documents begin with the first, "
                f"{followed[0]}"
            )
