"""Which format a folder has, and opening it."""

from pathlib import Path

from megaprec.errors import UserError
from tools.convert.hf import is_hf, open_hf
from tools.convert.megatron import find_megatron, open_megatron
from tools.convert.native import find_native, open_native
from tools.convert.source import Source

FORMATS = ("hf", "megaprec", "megatron")


def open_source(path: Path, vocab: int | None = None) -> Source:
    """Opens a folder of any format. vocab: tokens without padding, if a Megatron checkpoint does not say."""
    if not path.is_dir():
        raise UserError(f"{path} is {'no folder' if path.exists() else 'not there'}: give a folder with a model")
    if checkpoint := find_native(path):
        return open_native(checkpoint)
    if is_hf(path):
        return open_hf(path)
    if iteration := find_megatron(path):
        return open_megatron(iteration, vocab)
    raise UserError(
        f"{path} has none of the known formats: a megaprec checkpoint has checkpoint.json, a Hugging Face folder "
        "config.json, a Megatron checkpoint latest_checkpointed_iteration.txt, mp_rank_00/ or .metadata"
    )
