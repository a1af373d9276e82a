"""Which format a folder has, and opening it.

Every reader looks for its own files. A folder that two of them know is refused, for it is not known which is meant.
"""

from collections.abc import Callable
from pathlib import Path

from megaprec.checkpoint.intact import require_intact
from megaprec.checkpoint.store import Store
from megaprec.errors import UserError
from tools.convert.hf import find_hf, open_hf
from tools.convert.internevo import find_internevo, open_internevo
from tools.convert.megatron import find_megatron, open_megatron
from tools.convert.native import find_native, open_native
from tools.convert.source import Source

TARGETS = ("hf", "megaprec", "megatron")  # the formats that are written
NAMES = {"megaprec": "megaprec", "hf": "Hugging Face", "megatron": "Megatron-LM", "internevo": "InternEvo"}
FINDERS: dict[str, Callable[[Path], Path | None]] = {
    "megaprec": find_native,
    "hf": find_hf,
    "megatron": find_megatron,
    "internevo": find_internevo,
}
MARKS = (
    "a megaprec checkpoint has checkpoint.json, a Hugging Face folder config.json, a Megatron checkpoint "
    "latest_checkpointed_iteration.txt, mp_rank_00/ or .metadata, an InternEvo one model_tp0_pp0.pt"
)


def open_intact(path: Path, vocab: int | None = None, weights_only: bool = False) -> Source:
    """As `open_source`, but raises UserError, too, if a file of a checkpoint of ours is not what was saved."""
    if checkpoint := find_native(path):
        store = Store(checkpoint)
        require_intact(store, store.digests)
    return open_source(path, vocab, weights_only)


def open_source(path: Path, vocab: int | None = None, weights_only: bool = False) -> Source:
    """Opens a folder of any format. vocab: tokens without padding, if a Megatron checkpoint does not say. weights_only:
    of a Megatron checkpoint the optimizer's state is not looked at; UserError for another."""
    kind, found = format_of(path)
    if kind == "megatron":
        return open_megatron(found, vocab, weights_only)
    if weights_only:
        raise UserError(f"--weights-only is for Megatron checkpoints, and {path} is none: leave it out")
    opens = {"megaprec": open_native, "hf": open_hf, "internevo": open_internevo}
    return opens[kind](found)


def format_of(path: Path) -> tuple[str, Path]:
    """The format that the files of a folder show, and the folder of the checkpoint. UserError for none and for two."""
    if not path.is_dir():
        raise UserError(f"{path} is {'no folder' if path.exists() else 'not there'}: give a folder with a model")
    known = {kind: found for kind, find in FINDERS.items() if (found := find(path))}
    if len(known) > 1:
        names = " and of ".join(NAMES[kind] for kind in known)
        raise UserError(f"{path} has files of {names}: give a folder that has those of one alone")
    if not known:
        raise UserError(f"{path} has none of the known formats: {MARKS}")
    return next(iter(known.items()))
