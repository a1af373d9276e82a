"""Which format a folder has, and opening it."""

from pathlib import Path

from megaprec.checkpoint.folder import checkpoint_at
from megaprec.checkpoint.intact import require_intact
from megaprec.checkpoint.store import Store
from megaprec.errors import UserError
from tools.convert.hf import is_hf, open_hf
from tools.convert.megatron import find_megatron, open_megatron
from tools.convert.native import open_native
from tools.convert.source import Source

FORMATS = ("hf", "megaprec", "megatron")


def open_intact(path: Path, vocab: int | None = None, weights_only: bool = False) -> Source:
    """As `open_source`, but raises UserError, too, if a file of a checkpoint of ours is not what was saved."""
    if checkpoint := checkpoint_at(path):
        store = Store(checkpoint)
        require_intact(store, store.digests)
    return open_source(path, vocab, weights_only)


def open_source(path: Path, vocab: int | None = None, weights_only: bool = False) -> Source:
    """Opens a folder of any format. vocab: tokens without padding, if a Megatron checkpoint does not say. weights_only:
    of a Megatron checkpoint the optimizer's state is not looked at; UserError for another."""
    if not path.is_dir():
        raise UserError(f"{path} is {'no folder' if path.exists() else 'not there'}: give a folder with a model")
    checkpoint, hf = checkpoint_at(path), is_hf(path)
    if weights_only and (checkpoint or hf):
        raise UserError(f"--weights-only is for Megatron checkpoints, and {path} is none: leave it out")
    if checkpoint:
        return open_native(checkpoint)
    if hf:
        return open_hf(path)
    if iteration := find_megatron(path):
        return open_megatron(iteration, vocab, weights_only)
    raise UserError(
        f"{path} has none of the known formats: a megaprec checkpoint has checkpoint.json, a Hugging Face folder "
        "config.json, a Megatron checkpoint latest_checkpointed_iteration.txt, mp_rank_00/ or .metadata"
    )
