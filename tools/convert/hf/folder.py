"""Reading Hugging Face folders: config.json, weights, files of the tokenizer.

Weights are in safetensors, or in an older pytorch_model.bin, in one file or in shards.

DeepSeek-V3 and GLM-4.5 store modules of multi-token prediction as layers after the model's own
(`num_nextn_predict_layers`). Each has copies of the embedding and the head, which here are one
tensor with the model's own: copies that differ are refused. Folders that transformers has written
lack these layers, whatever config.json says.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megaprec.errors import Problem, UserError
from megaprec.parsing import read_json
from megaprec.text.tokenizer_files import SETTINGS, TEMPLATE
from models.activations import ACTIVATIONS
from models.config import ModelConfig
from tools.convert.core.finite import same_values
from tools.convert.core.names import (
    BUFFERS,
    CONSTANTS,
    HUGGING_FACE,
    IN_HALVES,
    OTHER_PREFIXES,
    PREFIXES,
    UNREAD,
)
from tools.convert.core.rules import Match, head_sizes, matches
from tools.convert.core.source import Facts, Origin, Source
from tools.convert.core.tensors import (
    Stored,
    safetensors_in,
    torch_name,
)
from tools.convert.core.torch_files import tensors_in
from tools.convert.core.transforms import SAME
from tools.convert.hf.config import (
    from_hugging_face,
    special_ids,
)
from tools.convert.hf.families import FAMILIES
from tools.convert.hf.notes import notes, rotary_notes
from tools.convert.hf.other_files import (
    index_notes,
    other_weights,
    require_plain,
    template_notes,
    unread_weights,
)
from tools.convert.hf.quantized import quantized_notes, with_quantized
from tools.convert.hf.stacked_experts import unstack_experts
from tools.convert.hf.text_models import text_config, text_tensors, wrapped_notes

CONFIG = "config.json"
GENERATION = "generation_config.json"

TensorLike = TypeVar("TensorLike")


class WeightFormat(NamedTuple):
    """A way to store weights: in one file, or in shards with an index. read: returns the tensors of
    a file."""

    index: str
    single: str
    read: Callable[[Path], dict[str, Stored]]


WEIGHTS = (
    WeightFormat("model.safetensors.index.json", "model.safetensors", safetensors_in),
    WeightFormat("pytorch_model.bin.index.json", "pytorch_model.bin", tensors_in),
)
NO_FACTS = Facts()
MOST_PROBLEMS = 10  # lines of a refusal
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", *SETTINGS, TEMPLATE)
# Names in the families that have modules of multi-token prediction.
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def find_hf(path: Path) -> Path | None:
    """Return `path` if it is a Hugging Face folder."""
    return path if (path / CONFIG).is_file() else None


def read_generation(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's generation_config.json; empty if there is none."""
    return read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json, of a model with other inputs than text that of its text
    model."""
    return dict(_name_folder_in_errors(folder, text_config, read_json(folder / CONFIG)))


def hf_model(folder: Path) -> ModelConfig:
    """Return the model of a folder's config.json, with the modules of multi-token prediction that
    its files hold."""
    model = _name_folder_in_errors(folder, from_hugging_face, read_config(folder))
    if model.mtp_layers and _has_modules(model, _tensor_names(folder)):
        return model
    return model.without_mtp


def _name_folder_in_errors(
    folder: Path, read: Callable[[dict[str, Any]], Any], config: dict[str, Any]
) -> Any:
    """Return what `read` makes of a config.json. UserErrors name the folder."""
    try:
        return read(config)
    except UserError as error:
        raise UserError(*(problem.within(f"{folder}: ") for problem in error.problems)) from error


def in_fp8(folder: Path) -> bool:
    """Return True if the config.json of a folder says that its weights are in FP8."""
    if not find_hf(folder):
        return False
    quantization = read_config(folder).get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "fp8"


def hf_tokenizer(folder: Path) -> list[Path]:
    """Return the tokenizer files of a folder. Raises UserError for settings that are no JSON
    objects."""
    for name in SETTINGS:
        if (folder / name).is_file():
            read_json(folder / name)
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def open_hf(folder: Path, system: str = "hf", facts: Facts = NO_FACTS) -> Source:
    """Open a folder, which another system may have written.

    system: the kind of the source.
    facts: what that system says besides.
    Raises UserError for missing, surplus and misshapen tensors, damaged files and unknown models.
    """
    model = hf_model(folder)
    config = read_config(folder)
    # of a model with several kinds of input: with that of its text model inside
    full_config = read_json(folder / CONFIG)
    model_type = config["model_type"]
    file_tensors = _read_tensors(folder)
    # Names first, as the table has them: what follows goes by names.
    tensors = text_tensors(file_tensors, full_config)
    tensors, unread_names = _without_unread(tensors, model_type)
    tensors = with_usual_prefix(tensors, model_type)
    tensors = _named_like_the_table(tensors, _usual_prefix(model_type))
    tensors = unstack_experts(tensors, model_type)
    stored = with_quantized(tensors, config, folder)
    _drop_constants(folder, model, model_type, stored)
    # DeepSeek-V3 may say so; published files have rotary partners side by side.
    in_halves = config.get("rope_interleave", True) is False
    tables = IN_HALVES if in_halves else HUGGING_FACE
    expected = matches(tables[model_type], model)
    # Copies are dropped before the tensors are counted.
    check_tied(folder, model, stored, expected)
    _drop_module_copies(folder, model, stored)
    check_tensors(folder, expected, stored)
    folder_notes = [
        *notes(
            config,
            FAMILIES[model_type].architecture,
            has_modules=model.mtp_layers > 0,
            has_unread_modules=bool(unread_names),
        ),
        *wrapped_notes(file_tensors, full_config),
        *quantized_notes(config),
        *_notes_on_unread(unread_names),
        *rotary_notes(model, file_tensors),
        *_notes_on_index(folder, file_tensors, system),
    ]
    read_files = {tensor.file for tensor in file_tensors.values()}
    if unread := unread_weights(folder, read_files):
        folder_notes.append(unread)
    named_notes = [f"{folder}: {note}" for note in folder_notes]
    facts = replace(
        facts,
        special=special_ids(config),
        generation=read_generation(folder),
        notes=(*facts.notes, *named_notes, *template_notes(folder)),
    )
    origins = _with_rows(expected, origins_of(expected, stored, model), stored)
    return Source(folder, system, model, origins, facts, hf_tokenizer(folder))


def _notes_on_index(folder: Path, file_tensors: Mapping[str, Stored], system: str) -> Sequence[str]:
    """Return notes on the index of shards that was read, if there is one."""
    for weights in WEIGHTS:
        index = folder / weights.index
        if index.is_file():
            return [*index_notes(index, file_tensors, in_bytes=system == "hf")]
    return ()


def _with_rows(
    expected: Sequence[Match], origins: Sequence[Origin], stored: Mapping[str, Any]
) -> list[Origin]:
    """Return the origins, such that tensors that are stored as ours are can be read by rows."""
    by_rows = []
    for match, origin in zip(expected, origins, strict=True):
        if match.how is SAME:
            origin = replace(origin, rows=stored[match.foreign].rows)
        by_rows.append(origin)
    return by_rows


def origins_of(
    expected: Sequence[Match], tensors: Mapping[str, Any], model: ModelConfig
) -> list[Origin]:
    """Return the origin of each match. tensors: with `read` and `dtype`, by foreign name."""
    origins = []
    for match in expected:
        tensor = tensors[match.foreign]
        origins.append(origin_of(match, tensor.read, tensor.dtype, model))
    return origins


def origin_of(
    match: Match,
    read: Callable[[], Tensor],
    dtype: torch.dtype,
    model: ModelConfig,
    kind: str = "weight",
) -> Origin:
    """Return the origin whose foreign tensor `read` returns."""
    sizes = head_sizes(model)
    keys = tuple(f"{kind}/{tensor_name}" for tensor_name in match.logical)
    # The shapes of the parts follow from a split without values.
    parts = match.how.split(torch.empty(match.shape, device="meta"), sizes)
    shapes = tuple(tuple(part.shape) for part in parts)

    def load() -> Sequence[Tensor]:
        return match.how.split(read(), sizes)

    return Origin(f"{kind}/{match.foreign}", keys, shapes, dtype, load)


def has_weights(folder: Path) -> bool:
    """Return True if the folder holds weights in Hugging Face's format."""
    return any(
        (folder / weights.index).is_file() or (folder / weights.single).is_file()
        for weights in WEIGHTS
    )


def _read_tensors(folder: Path) -> dict[str, Stored]:
    """Return all tensors of the folder by their names in it."""
    # Before anything is read: what lies beside the weights may make them another model.
    require_plain(folder, {weights.index: weights.single for weights in WEIGHTS})
    for weights in WEIGHTS:
        if (folder / weights.index).is_file():
            return _read_shards(folder, weights)
        if (folder / weights.single).is_file():
            return weights.read(folder / weights.single)
    none = "neither model.safetensors nor pytorch_model.bin, nor an index of shards"
    raise UserError.of(
        "convert.hf_no_weights", path=folder, reason=none, other_weights=other_weights(folder)
    )


def _tensor_names(folder: Path) -> set[str]:
    """Return the names of all tensors of the folder, of shards by their index; none if it has no
    weights."""
    for weights in WEIGHTS:
        if (folder / weights.index).is_file():
            weight_map = read_json(folder / weights.index).get("weight_map")
            return set(weight_map) if isinstance(weight_map, dict) else set()
        if (folder / weights.single).is_file():
            return set(weights.read(folder / weights.single))
    return set()


def _read_shards(folder: Path, weights: WeightFormat) -> dict[str, Stored]:
    """Return the tensors of all shards. Raises UserError unless they are those of the index."""
    index = weights.index
    weight_map = read_json(folder / index).get("weight_map")
    is_map = isinstance(weight_map, dict)
    if not is_map or not all(map(_is_file_name, weight_map.values())):
        raise UserError.of("convert.hf_weight_map", path=folder / index)
    # Each file is opened once, however many tensors the index names in it.
    shards = sorted(set(weight_map.values()))
    problems: list[Problem] = []
    for shard in shards:
        if not (folder / shard).is_file():
            problems.append(Problem.of("convert.shard_missing", path=folder / shard, index=index))
    if problems:
        raise UserError(*problems)
    stored: dict[str, Stored] = {}
    for shard in shards:
        tensors = weights.read(folder / shard)
        if repeated := sorted(tensors.keys() & stored.keys()):
            raise UserError.of("convert.hf_tensor_twice", path=folder, repeated=repeated[0])
        stored |= tensors
    if lost := sorted(weight_map.keys() - stored.keys()):
        raise UserError.of("convert.hf_tensor_missing", path=folder, index=index, lost=lost[0])
    return stored


def _is_file_name(value: Any) -> bool:
    """Return True for the name of a file, without a folder: no path leaves the model's folder."""
    return isinstance(value, str) and Path(value).name == value


def _without_unread(
    tensors: Mapping[str, Stored], model_type: str
) -> tuple[dict[str, Stored], list[str]]:
    """Return the tensors that are read, and the names of those that are not."""
    beginning = UNREAD.get(model_type)
    if beginning is None:
        return dict(tensors), []
    read = {name: stored for name, stored in tensors.items() if not name.startswith(beginning)}
    return read, sorted(tensors.keys() - read.keys())


def _notes_on_unread(names: Sequence[str]) -> Iterator[str]:
    """Yield a note on tensors that are not read, if there are any."""
    if names:
        yield (
            f"{len(names)} tensors of multi-token prediction ({names[0]}, ...) are not read: "
            "transformers has no place for them"
        )


def _usual_prefix(model_type: str) -> str:
    """Return the beginning of the names of a family in `HUGGING_FACE`, the table of names, but for
    the head."""
    return PREFIXES.get(model_type, "model.")


def with_usual_prefix(tensors: Mapping[str, TensorLike], model_type: str) -> dict[str, TensorLike]:
    """Return the tensors with the prefix that their names have in `HUGGING_FACE`, in place of
    another one of the family."""
    other = OTHER_PREFIXES.get(model_type)
    if other is None:
        return dict(tensors)
    prefix = _usual_prefix(model_type)
    renamed = {}
    for tensor_name, stored in tensors.items():
        usual_name = tensor_name
        if tensor_name.startswith(other):
            usual_name = prefix + tensor_name.removeprefix(other)
        # Of two tensors for one place neither replaces the other: one has no place.
        renamed[tensor_name if usual_name in tensors else usual_name] = stored
    return renamed


def _named_like_the_table(tensors: Mapping[str, Stored], prefix: str) -> dict[str, Stored]:
    """Return the tensors without buffers, with the prefix that a folder saved without the head
    omits."""
    parameters = {}
    for tensor_name, stored in tensors.items():
        if not tensor_name.endswith(BUFFERS):
            parameters[tensor_name] = stored
    for tensor_name in parameters:
        # A folder that was saved with the head has the prefix already, if only behind another that
        # `check_tensors` speaks of.
        if tensor_name.startswith(prefix) or f".{prefix}" in tensor_name:
            return parameters
    return {prefix + tensor_name: stored for tensor_name, stored in parameters.items()}


def check_tied(
    folder: Path, model: ModelConfig, stored: dict[str, Any], expected: Sequence[Match]
) -> None:
    """Check that a tied head that was saved nevertheless equals the embedding; it is then
    dropped."""
    embedding = next(match.foreign for match in expected if match.logical == ("embedding.weight",))
    # As the families call it; GPT-NeoX is the second.
    for head in ("lm_head.weight", "embed_out.weight"):
        # transformers leaves out a tied head; other programs may save it.
        if model.tied and head in stored and embedding in stored:
            if not same_values(stored[head].read(), stored[embedding].read()):
                raise UserError.of(
                    "convert.hf_tied_differs",
                    path=folder,
                    head=head,
                    embedding=embedding,
                    config_path=folder / CONFIG,
                )
            del stored[head]


def check_tensors(folder: Path, expected: Sequence[Match], tensors: Mapping[str, Any]) -> None:
    """Raise UserError unless `tensors` are exactly those that are expected, with the same shapes,
    of floats."""
    shapes = {match.foreign: match.shape for match in expected}
    first_name = next(iter(shapes), "")
    _check_not_wrapped(folder, first_name, tensors)
    problems = [*_tensor_problems(folder, shapes, tensors)]
    # Of another model every tensor is a problem.
    unnamed = len(problems) - MOST_PROBLEMS
    if unnamed > 0:
        problems = problems[:MOST_PROBLEMS]
        problems.append(Problem.of("convert.tensor_problems_more", unnamed=unnamed))
    if problems:
        raise UserError(*problems)


def _tensor_problems(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield a line for each tensor that is missing, surplus, of another shape or not of floats.

    shapes: of those that are expected, by name.
    """
    for name, shape in shapes.items():
        if name not in tensors:
            yield Problem.of("convert.tensor_missing", path=folder, name=name, shape=list(shape))
    for name in tensors:
        if name not in shapes:
            yield Problem.of("convert.tensor_surplus", path=folder, name=name)
    present = {name: shape for name, shape in shapes.items() if name in tensors}
    for name, shape in present.items():
        actual_shape = tuple(tensors[name].shape)
        if actual_shape != shape:
            yield Problem.of(
                "convert.tensor_shape",
                path=folder,
                name=name,
                shape=list(actual_shape),
                expected_shape=list(shape),
            )
    for name in present:
        dtype = tensors[name].dtype
        # FP8 without scales is no weight.
        if not dtype.is_floating_point or dtype.itemsize == 1:
            yield Problem.of(
                "convert.tensor_dtype", path=folder, name=name, dtype=torch_name(dtype)
            )


def _check_not_wrapped(folder: Path, first: str, tensors: Mapping[str, Any]) -> None:
    """Raise UserError if names have something before them. first: the name of one that is
    expected."""
    if first in tensors:
        return
    for tensor_name in tensors:
        if tensor_name.endswith(f".{first}"):
            prefix = tensor_name.removesuffix(first)
            raise UserError.of(
                "convert.hf_name_prefix", path=folder, prefix=prefix, name=tensor_name
            )


def constants(model: ModelConfig, model_type: str) -> Iterator[tuple[Match, float]]:
    """Yield the numbers beside the weights that all models of a family have, with their values.

    Each is written as a copy of the first number that the activation of its layer learns, which has
    its dtype.
    """
    learned = next(iter(ACTIVATIONS[model.mlp].parameters), "")
    for ending, value in CONSTANTS.get(model_type, {}).items():
        for layer in range(model.layers):
            beside = f"layers.{layer}.mlp.activation.{learned}"
            yield Match(f"model.layers.{layer}.{ending}", (beside,), SAME, "whole", ()), value


def _drop_constants(
    folder: Path, model: ModelConfig, model_type: str, stored: dict[str, Any]
) -> None:
    """Remove the numbers of `constants`. Raises UserError for one with another value."""
    for match, expected in constants(model, model_type):
        if match.foreign not in stored:
            continue
        value = stored[match.foreign].read().float()
        # rounded to whatever dtype the file was made in
        if value.numel() != 1 or not math.isclose(value.item(), expected, rel_tol=2**-8):
            raise UserError.of(
                "convert.hf_constant",
                path=folder,
                name=match.foreign,
                value=value.tolist(),
                kind=model_type,
                expected=expected,
            )
        del stored[match.foreign]


def _has_modules(model: ModelConfig, names: set[str]) -> bool:
    """Return True if a folder with tensors of these names holds something of the model's
    modules."""
    prefixes = tuple(f"model.layers.{layer}." for layer in _module_layers(model))
    return any(tensor_name.startswith(prefixes) for tensor_name in names)


def _module_layers(model: ModelConfig) -> range:
    """Return the numbers of the layers of modules, after those of the model."""
    return range(model.layers, model.layers + model.mtp_layers)


def module_copies(model: ModelConfig) -> Iterator[Match]:
    """Yield the copies of embedding and head that each module has in a folder."""
    shape = (model.vocab, model.hidden)
    head = "embedding.weight" if model.tied else "head.weight"
    for layer in _module_layers(model):
        prefix = f"model.layers.{layer}"
        yield Match(f"{prefix}.embed_tokens.weight", ("embedding.weight",), SAME, "whole", shape)
        yield Match(f"{prefix}.shared_head.head.weight", (head,), SAME, "whole", shape)


def _drop_module_copies(folder: Path, model: ModelConfig, stored: dict[str, Any]) -> None:
    """Remove the modules' copies of embedding and head. Raises UserError if one differs from its
    original."""
    for match in module_copies(model):
        # A tied model's head is its embedding, and so is the module's.
        original = _EMBEDDING if match.logical == ("embedding.weight",) else _HEAD
        if match.foreign in stored and original in stored:
            # Published files have copies; a module trained apart would be another model.
            if not same_values(stored[match.foreign].read(), stored[original].read()):
                raise UserError.of(
                    "convert.hf_mtp_copy_differs",
                    path=folder,
                    foreign=match.foreign,
                    original=original,
                )
            del stored[match.foreign]
