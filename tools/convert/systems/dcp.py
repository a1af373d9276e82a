"""Reading PyTorch's distributed checkpoints (torch.distributed.checkpoint): torchtitan's, and those
of FSDP around a model of transformers.

    .metadata          a pickle: which tensors there are, and where their parts lie
    __0_0.distcp       the parts that rank 0 has
    config.json        of the model in Hugging Face's format, which has to be put here or in the
                       folder above; otherwise it is the [model] of a run file

Names have before them what the program that saved put around the model (`model.`, `app.model.`),
and may have those of wrappers within. Weights are read, the optimizer's state is not. No pickle is
opened in this process (`tools.convert.core.untrusted`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.parsing import read_json
from models.config import ModelConfig
from tools.convert.core.chunks import Chunked, merge_parts, require_inside
from tools.convert.core.finite import same_values
from tools.convert.core.names import BUFFERS, HUGGING_FACE, IN_HALVES
from tools.convert.core.rules import Match, NameRule, matches
from tools.convert.core.shards import TensorSource
from tools.convert.core.source import Facts, Source
from tools.convert.core.torch_files import distributed_contents
from tools.convert.hf.config import from_hugging_face, model_type_of, special_ids
from tools.convert.hf.families import FAMILIES
from tools.convert.hf.folder import (
    CONFIG,
    check_tensors,
    hf_tokenizer,
    origins_of,
    read_generation,
    with_usual_prefix,
)
from tools.convert.hf.notes import notes
from tools.convert.hf.stacked_experts import published_name, rules_inside
from tools.convert.hf.text_models import text_config, text_tensors, wrapped_notes
from tools.convert.megatron.read import DISTRIBUTED
from tools.convert.systems import torchtitan

METADATA = ".metadata"
# Modules that wrap others, by which a name may pass.
_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# First parts of names that are no weights, where nothing is before the names of weights.
_STATE = re.compile(
    r"(?:optim(?:izer)?s?|lr_schedulers?|schedulers?|dataloader|train_state|state|param_groups)\."
)
# Names of the embedding in all families: what is before it is before all weights.
_EMBEDDINGS = (
    torchtitan.EMBEDDING,
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "transformer.wte.weight",
    "gpt_neox.embed_in.weight",
    "backbone.embeddings.weight",
    "model.embeddings.weight",
)
_HEADS = (*torchtitan.HEADS, "embed_out.weight")


@dataclass(frozen=True)
class _Described:
    """The model of a checkpoint, and the file that describes it.

    origin: the file that says it.
    model_type: Hugging Face's, of the names of its tensors.
    outer_config: the config.json; empty if a run file says it.
    config: the same, of a model with other inputs than text that of its text model.
    """

    model: ModelConfig
    origin: str
    model_type: str
    outer_config: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def find_dcp(path: Path) -> Path | None:
    """Return `path` if it has a distributed checkpoint that is not Megatron-core's."""
    has_metadata = (path / METADATA).is_file()
    of_megatron = any((path / name).is_file() for name in DISTRIBUTED)
    return path if has_metadata and not of_megatron else None


def open_dcp(checkpoint: Path, model: ModelConfig | None = None) -> Source:
    """Open a checkpoint's folder. UserError for what is missing, surplus or not known.

    model: what its tensors are of, if no config.json says it; UserError beside one.
    """
    tensors, others = _read_weights(checkpoint)
    of_torchtitan = torchtitan.EMBEDDING in tensors
    described = _describe(checkpoint, model, of_torchtitan)
    names_notes: list[str] = []
    if of_torchtitan:
        spelling = torchtitan.VersionSpelling.of(tensors)
        rules = torchtitan.titan_rules(checkpoint, described.model, spelling)
        weights = torchtitan.titan_weights(checkpoint, tensors, described.model, spelling)
        names_notes.append(f"the names are those of torchtitan's {spelling.model}")
        names_notes += torchtitan.notes_on_norms(described.model, spelling)
        if any(name.startswith(torchtitan.MODULES) for name in tensors):
            others = (*others, f"modules of multi-token prediction ({torchtitan.MODULES}*)")
    else:
        rules, weights = _hugging_face(tensors, described)
        names_notes.append(f"the names are those of Hugging Face's {described.model_type}")
        names_notes += wrapped_notes(tensors, described.outer_config)
    expected = matches(rules, described.model)
    _drop_tied_head(checkpoint, described, weights, expected)
    check_tensors(checkpoint, expected, weights)
    return _source(checkpoint, described, expected, weights, others, names_notes)


def _source(
    checkpoint: Path,
    described: _Described,
    expected: Sequence[Match],
    weights: Mapping[str, TensorSource],
    others: Sequence[str],
    names_notes: Sequence[str],
) -> Source:
    """Return the source of checked weights.

    others: what is not read. names_notes: on the names of tensors.
    """
    origins = origins_of(expected, weights, described.model)
    folder_notes = [f"{checkpoint}: {note}" for note in names_notes]
    facts = Facts(unread=", ".join(others))
    tokenizer = hf_tokenizer(checkpoint)
    if described.config:
        folder = Path(described.origin).parent
        architecture = FAMILIES[described.model_type].architecture
        # The model is read without modules of multi-token prediction.
        config_notes = notes(described.config, architecture, has_modules=False)
        if described.config.get("quantization_config") is not None:
            # That of the published weights; a training has weights of its own.
            config_notes.append("quantization_config is not read: these weights are as they are")
        folder_notes += [f"{described.origin}: {note}" for note in config_notes]
        facts = replace(
            facts, special=special_ids(described.config), generation=read_generation(folder)
        )
        tokenizer = tokenizer or hf_tokenizer(folder)
    else:
        folder_notes.append(
            "what the model is was taken from the run file, for nothing here says it"
        )
    facts = replace(facts, notes=tuple(folder_notes))
    return Source(checkpoint, "dcp", described.model, origins, facts, tokenizer)


def _read_weights(checkpoint: Path) -> tuple[dict[str, TensorSource], tuple[str, ...]]:
    """Return the tensors of the model by their names in it, and what else there is."""
    entries, _ = distributed_contents(checkpoint)
    unwrapped = {saved_name: _WRAPPERS.sub("", saved_name) for saved_name in entries}
    prefix = _prefix(checkpoint, unwrapped.values())
    tensors: dict[str, TensorSource] = {}
    others: dict[str, None] = {}  # in order, each once
    for saved_name, name in unwrapped.items():
        if not name.startswith(prefix) or (not prefix and _STATE.match(name)):
            others[_subject(name)] = None
            continue
        name = name.removeprefix(prefix)
        if name in tensors:
            raise UserError.of("convert.dcp_twice", path=checkpoint, name=name)
        entry = entries[saved_name]
        tensor = Chunked(saved_name, tuple(entry["shape"]), entry["chunks"])
        require_inside(checkpoint, tensor)
        tensors[name] = merge_parts(checkpoint, saved_name, [tensor])
    return tensors, tuple(others)


def _prefix(checkpoint: Path, names: Iterable[str]) -> str:
    """Return what is before the names of the model's tensors, which the embedding tells."""
    prefixes: dict[str, str] = {}
    for name, embedding in product(names, _EMBEDDINGS):
        if f".{name}".endswith(f".{embedding}"):
            prefixes[name.removesuffix(embedding)] = name
    if not prefixes:
        raise UserError.of(
            "convert.dcp_no_model", path=checkpoint, embeddings=", ".join(_EMBEDDINGS)
        )
    if len(prefixes) > 1:
        embeddings = " and ".join(prefixes.values())
        raise UserError.of("convert.dcp_several_models", path=checkpoint, names=embeddings)
    return next(iter(prefixes))


def _subject(saved_name: str) -> str:
    """Return the words for a tensor that is not read."""
    parts = saved_name.split(".")
    is_in_optimizer = any(part.startswith("optim") for part in parts[:2])
    if is_in_optimizer or parts[0] in ("state", "param_groups"):
        return "the optimizer's state"
    return parts[0]


def _describe(checkpoint: Path, model: ModelConfig | None, of_torchtitan: bool) -> _Described:
    """Return what the model is. UserError if nothing says it, or both a config.json and a run
    file."""
    of_model = config_file(checkpoint)
    if of_model is None and model is None:
        raise UserError.of("convert.dcp_config_missing", path=checkpoint / CONFIG)
    if of_model is None:
        assert model is not None
        # torchtitan's names are its own, whatever Hugging Face calls the model.
        model_type = "" if of_torchtitan else model_type_of(model)
        return _Described(model.without_mtp, "the run file", model_type)
    if model is not None:
        raise UserError.of("convert.config_unused", path=of_model)
    try:
        outer_config = read_json(of_model)
        config = text_config(outer_config)
        of_config = from_hugging_face(config).without_mtp
        if of_torchtitan:
            of_config = torchtitan.with_titan_norms(of_config)
    except UserError as error:
        problems = [problem.within(f"{of_model}: ") for problem in error.problems]
        raise UserError(*problems) from error
    return _Described(of_config, f"{of_model}", config["model_type"], outer_config, config)


def config_file(checkpoint: Path) -> Path | None:
    """Return the config.json of the model; None if there is none."""
    for folder in (checkpoint, checkpoint.absolute().parent):
        if (folder / CONFIG).is_file():
            return folder / CONFIG
    return None


def _hugging_face(
    tensors: Mapping[str, TensorSource], described: _Described
) -> tuple[Sequence[NameRule], dict[str, TensorSource]]:
    """Return the rules of a model of transformers, and its weights by the names of published files,
    but for experts in one tensor."""
    weights: dict[str, TensorSource] = {}
    text_weights = text_tensors(tensors, described.outer_config)
    for name, tensor in with_usual_prefix(text_weights, described.model_type).items():
        if not name.endswith(BUFFERS):
            weights[published_name(name, described.model_type)] = tensor
    # rotary partners are halves of a head, and not neighbours
    in_halves = described.config.get("rope_interleave", True) is False
    tables = IN_HALVES if in_halves else HUGGING_FACE
    rules = tables[described.model_type]
    # Its published files stack experts too, and the name table knows them.
    if described.model_type == "gpt_oss":
        return rules, weights
    return rules_inside(rules, weights), weights


def _drop_tied_head(
    checkpoint: Path,
    described: _Described,
    weights: dict[str, TensorSource],
    expected: Sequence[Match],
) -> None:
    """Remove the head of a tied model, which must be its embedding."""
    if not described.model.tied:
        return
    embedding = next(match.foreign for match in expected if match.logical == ("embedding.weight",))
    for head in _HEADS:
        if head not in weights or embedding not in weights:
            continue
        if not same_values(weights[head].read(), weights[embedding].read()):
            raise UserError.of(
                "convert.dcp_tied_differs",
                path=checkpoint,
                head=head,
                embedding=embedding,
                origin=described.origin,
            )
        del weights[head]
