"""The weighted mean of the weights of several models, in any formats, as a model to be written.

Each number of a logical tensor is the sum of the inputs' numbers times their weights, in FP64 and
in the order of the inputs: ((w0 x0 + w1 x1) + w2 x2) + ..., every product and every sum rounded to
FP64, and the last sum once to the dtype of the output.

A correction of a router by loads is no weight: it is moved by counts of tokens until its own
experts are chosen equally often, and is taken from the last input.

The models are read one after the other, a tensor of each at a time: some rows if all inputs store
it as ours is, otherwise the whole tensors of the formats that have it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial as bind
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megaprec.errors import Problem, UserError
from megaprec.precision.rounding import from_double
from megaprec.text.tokenizer import same_tokens
from models.feed_forward.router import is_correction
from tools.console.toml import toml
from tools.console.units import counted
from tools.convert.core.finite import not_finite
from tools.convert.core.source import Facts, MergedInput, Origin, Source
from tools.convert.core.tensors import PIECE
from tools.convert.hf.config import differing_fields, without_effect
from tools.convert.hf.vocabulary import main_file

MOST_PROBLEMS = 10  # lines of a refusal
WEIGHT = "weight/"


def merge(sources: Sequence[Source], weights: Sequence[float], dtype: torch.dtype | None) -> Source:
    """Return the mean of the weights of two or more models, without optimizer state.

    weights: of each source in the mean; they sum to 1.
    dtype: of the mean, but of routers' corrections, which keep theirs; None: that of each tensor in
        the first source.
    What is not a tensor is the first source's, but for its tokenizer: that of the first with one.
    Raises UserError, with a line for each difference, if the models or their tokenizers are not the
    same. Reading a tensor raises UserError if an input has a number in it that is NaN or infinite.
    """
    _require_one_model(sources)
    _require_one_tokenizer(sources)
    first = sources[0]
    last = sources[-1]
    dtypes = {key: first.dtype_in(key, dtype) for key in first.keys("weight")}
    origins = list[Origin]()
    corrections = list[str]()
    for keys in _groups(sources):
        first_key = keys[0]
        if is_correction(first_key):
            corrections.append(first_key)
            origins.append(_of_last(first_key, last))
        else:
            origins.append(_mean(keys, sources, weights, dtypes))
    facts = _facts(sources, weights, corrections)
    tokenizers = [source.tokenizer for source in sources if main_file(source.tokenizer)]
    tokenizer = tokenizers[0] if tokenizers else ()
    return Source(first.path, first.kind, first.model, origins, facts, tokenizer)


def _require_one_model(sources: Sequence[Source]) -> None:
    """Raise UserError unless all models compute the same from the same weights."""
    first = sources[0]
    problems = list[Problem]()
    for other in sources[1:]:
        fields = differing_fields(first.model, other.model)
        needless = {*without_effect(first.model)}
        # fields that change no result in this model may differ
        if needless.issuperset(fields):
            continue
        for field in fields:
            value = getattr(first.model, field)
            other_value = getattr(other.model, field)
            problem = Problem.of(
                "convert.merge_model_differs",
                key=f"model.{field}",
                value=toml(value),
                path=first.path,
                other_value=toml(other_value),
                other_path=other.path,
            )
            problems.append(problem)
    if problems:
        raise UserError(*problems[:MOST_PROBLEMS])


def _require_one_tokenizer(sources: Sequence[Source]) -> None:
    """Raise UserError unless equal ids mean equal tokens in all tokenizers that there are."""
    files = list[Path]()
    for source in sources:
        if file := main_file(source.tokenizer):
            files.append(file)
    problems = list[Problem]()
    for other_file in files[1:]:
        first_file = files[0]
        if not same_tokens(first_file, other_file):
            problem = Problem.of(
                "convert.merge_tokenizer_differs", file=first_file, other_file=other_file
            )
            problems.append(problem)
    if problems:
        raise UserError(*problems[:MOST_PROBLEMS])


def _facts(sources: Sequence[Source], weights: Sequence[float], corrections: list[str]) -> Facts:
    """Return what is known of the mean besides its tensors."""
    first = sources[0]
    merged = list[MergedInput]()
    unread = dict[str, None]()  # in order, each once
    notes = dict[str, None]()
    for source, weight in zip(sources, weights, strict=True):
        merged.append(MergedInput(source.path, source.kind, weight))
        if source.facts.unread:
            unread[source.facts.unread] = None
        # moments and the like, which no mean is taken of
        unread_kinds = [kind for kind in source.kinds if kind != "weight"]
        unread.update(dict.fromkeys(unread_kinds))
        notes.update(dict.fromkeys(source.facts.notes))
    if corrections:
        others = f" and {len(corrections) - 1} more" if len(corrections) > 1 else ""
        count = counted(len(corrections), "correction")
        last = sources[-1]
        note = (
            f"{count} of routers by loads, {corrections[0]}"
            f"{others}: of {last.path}, the last, for they are no weights to be averaged"
        )
        notes[note] = None
    return Facts(
        unread=", ".join(unread),
        special=first.facts.special,
        generation=first.facts.generation,
        documents=first.facts.documents,
        merged=tuple(merged),
        notes=tuple(notes),
    )


def _groups(sources: Sequence[Source]) -> Iterator[list[str]]:
    """Yield the keys of all weights, those together that must be read together: a packed tensor of
    one input may have parts that lie in several tensors of another."""
    done = set[str]()
    first = sources[0]
    for key in first.keys("weight"):
        if key in done:
            continue
        done.add(key)
        group = [key]
        # The list grows while it is walked through.
        for member in group:
            for source in sources:
                origin = source.origin(member)
                for sibling in origin.keys:
                    if sibling not in done and sibling.startswith(WEIGHT):
                        done.add(sibling)
                        group.append(sibling)
        yield group


def _of_last(key: str, source: Source) -> Origin:
    """Return the origin of a tensor that is taken from `source` as it is."""

    def load() -> list[Tensor]:
        values = source.read(key)
        return [_require_finite(values, key, source)]

    shape = source.shapes[key]
    return Origin(key, (key,), (shape,), source.dtype(key), load)


def _mean(
    keys: Sequence[str],
    sources: Sequence[Source],
    weights: Sequence[float],
    dtypes: Mapping[str, torch.dtype],
) -> Origin:
    """Return the origin of logical tensors that are averaged. dtypes: of the means, by key."""
    shapes_by_key = sources[0].shapes
    shapes = tuple(shapes_by_key[key] for key in keys)
    first_key = keys[0]
    first_shape = shapes[0]
    dtype = dtypes[first_key]
    has_rows = all(source.origin(first_key).rows for source in sources)
    # by rows, which takes less memory; a scalar has none
    if len(keys) == 1 and has_rows and first_shape:
        rows = bind(_mean_of_rows, first_key, sources, weights, dtype)
        load = bind(_whole, rows, first_shape, dtype)
        return Origin(first_key, (first_key,), shapes, dtype, load, rows)
    load = bind(_means_of_whole, keys, sources, weights, dtypes)
    return Origin(first_key, tuple(keys), shapes, dtype, load)


def _mean_of_rows(
    key: str,
    sources: Sequence[Source],
    weights: Sequence[float],
    dtype: torch.dtype,
    top: int,
    bottom: int,
) -> Tensor:
    """Return rows [top, bottom) of a mean, in `dtype`."""
    total = torch.empty(0)
    weighted_sources = zip(sources, weights, strict=True)
    for number, (source, weight) in enumerate(weighted_sources):
        rows = source.rows(key, top, bottom)
        rows = _require_finite(rows, key, source)
        product = rows.double().mul_(weight)
        total = product if number == 0 else total.add_(product)
    return from_double(total, dtype)


def _whole(
    rows: Callable[[int, int], Tensor], shape: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    """Return a tensor whole. It is filled in by pieces, so that few of its numbers are FP64.

    rows: returns rows [top, bottom) of it.
    """
    mean = torch.empty(tuple(shape), dtype=dtype)
    num_rows, *row_shape = shape
    row_bytes = prod(row_shape) * dtype.itemsize
    piece_rows = max(1, PIECE // max(1, row_bytes))
    for top in range(0, num_rows, piece_rows):
        bottom = min(top + piece_rows, num_rows)
        mean[top:bottom] = rows(top, bottom)
    return [mean]


def _means_of_whole(
    keys: Sequence[str],
    sources: Sequence[Source],
    weights: Sequence[float],
    dtypes: Mapping[str, torch.dtype],
) -> list[Tensor]:
    """Return the means of tensors that are read together, in the order of their keys."""
    totals = dict[str, Tensor]()  # FP64
    for source, weight in zip(sources, weights, strict=True):
        for key in _in_order_of(source, keys):
            values = _require_finite(source.read(key), key, source)
            if key in totals:
                _add(totals[key], values, weight)
            else:
                totals[key] = values.double().mul_(weight).contiguous()
    # Taken out one by one, so that each is let go of as soon as it is rounded.
    return [_rounded(totals.pop(key), dtypes[key]) for key in keys]


def _in_order_of(source: Source, keys: Iterable[str]) -> list[str]:
    """Return keys such that those of one foreign tensor are neighbours: each is then read once."""
    by_origin = dict[str, list[str]]()
    for key in keys:
        origin = source.origin(key)
        neighbours = by_origin.setdefault(origin.name, [])
        neighbours.append(key)
    ordered = list[str]()
    for neighbours in by_origin.values():
        ordered += neighbours
    return ordered


def _add(total: Tensor, values: Tensor, weight: float) -> None:
    """Add the product of values and their weight to an FP64 total of the same shape, a piece at a
    time."""
    block = PIECE // total.itemsize
    total_blocks = total.view(-1).split(block)
    blocks_of_values = values.reshape(-1).split(block)
    for total_block, block_of_values in zip(total_blocks, blocks_of_values, strict=True):
        # Not add_ with alpha, which may round product and sum at once.
        product = block_of_values.double().mul_(weight)
        total_block.add_(product)


def _rounded(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an FP64 tensor in `dtype`, rounded a piece at a time."""
    mean = torch.empty(total.shape, dtype=dtype)
    block = PIECE // total.itemsize
    mean_blocks = mean.view(-1).split(block)
    total_blocks = total.view(-1).split(block)
    for mean_block, total_block in zip(mean_blocks, total_blocks, strict=True):
        rounded = from_double(total_block, dtype)
        mean_block.copy_(rounded)
    return mean


def _require_finite(values: Tensor, key: str, source: Source) -> Tensor:
    """Return the values. Raises UserError if one is NaN or infinite, which a mean would hide or
    spread."""
    if not_finite(values):
        raise UserError.of("convert.merge_not_finite", path=source.path, key=key)
    return values
