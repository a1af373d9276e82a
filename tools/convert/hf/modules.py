"""Modules of multi-token prediction in Hugging Face folders.

DeepSeek-V3 and GLM-4.5 store them as layers after the model's own (`num_nextn_predict_layers`).
Each has copies of the embedding and the head, which here are one tensor with the model's own:
copies that differ are refused. Folders that transformers has written lack these layers, whatever
config.json says.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.core.finite import same_values
from tools.convert.core.rules import Match
from tools.convert.core.transforms import SAME

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def has_modules(model: ModelConfig, names: set[str]) -> bool:
    """Return True if a folder with tensors of these names holds something of the model's
    modules."""
    prefixes = tuple(f"model.layers.{layer}." for layer in _module_layers(model))
    return any(name.startswith(prefixes) for name in names)


def _module_layers(model: ModelConfig) -> range:
    """Return the numbers of the layers of modules, after those of the model."""
    return range(model.layers, model.layers + model.mtp_layers)


def copies(model: ModelConfig) -> Iterator[Match]:
    """Yield the copies of embedding and head that each module has in a folder."""
    shape = (model.vocab, model.hidden)
    head = "embedding.weight" if model.tied else "head.weight"
    for layer in _module_layers(model):
        prefix = f"model.layers.{layer}"
        yield Match(f"{prefix}.embed_tokens.weight", ("embedding.weight",), SAME, "whole", shape)
        yield Match(f"{prefix}.shared_head.head.weight", (head,), SAME, "whole", shape)


def take_copies(path: Path, model: ModelConfig, stored: dict[str, Any]) -> None:
    """Remove the modules' copies of embedding and head. Raises UserError if one differs from its
    original."""
    for match in copies(model):
        # A tied model's head is its embedding, and so is the module's.
        original = EMBEDDING if match.logical == ("embedding.weight",) else HEAD
        if match.foreign in stored and original in stored:
            if not same_values(stored[match.foreign].read(), stored[original].read()):
                raise UserError.of(
                    "convert.hf_mtp_copy_differs",
                    path=path,
                    foreign=match.foreign,
                    original=original,
                )
            del stored[match.foreign]


def left_modules(model: ModelConfig) -> tuple[str, ...]:
    """Return what is said of a model's modules where a format has no place for them."""
    if model.mtp_layers:
        return (f"modules of multi-token prediction (model.mtp_layers = {model.mtp_layers})",)
    return ()
