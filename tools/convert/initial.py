"""Weights of a Hugging Face folder, or of a checkpoint of ours, as the first weights of a run, in any layout.

Every rank reads what it holds: rows of a tensor that is stored as ours is, the whole tensor where it has to be
rearranged first.
"""

from math import prod
from pathlib import Path

from torch import Tensor

from megaprec.checkpoint.intact import require_intact
from megaprec.checkpoint.state import load_weights
from megaprec.checkpoint.store import INDEX, Store
from megaprec.errors import UserError
from megaprec.layout import Part
from megaprec.optimizer import ParallelAMPOptimizer
from models.config import ModelConfig
from tools.convert.hf import CONFIG, hf_model, hf_tokenizer, is_hf, open_hf
from tools.convert.native import find_native, native_model, open_native
from tools.convert.source import Source
from tools.convert.vocabulary import check_tokenizer, main_file


def initial_model(folder: Path) -> tuple[ModelConfig, Path | None, str]:
    """The model of train.init_from, its tokenizer's file if it has one, and what says so. Raises UserError."""
    if checkpoint := find_native(folder):
        return *native_model(checkpoint), f"{checkpoint / INDEX}"
    _require_hf(folder)
    return hf_model(folder), main_file(hf_tokenizer(folder)), f"{folder / CONFIG}"


def open_initial(folder: Path) -> Source:
    """Opens the folder of train.init_from and looks at all of it but the values. Raises UserError."""
    checkpoint = find_native(folder)
    if not checkpoint:
        _require_hf(folder)
    source = open_native(checkpoint) if checkpoint else open_hf(folder)
    check_tokenizer(source.tokenizer, source.model.vocab)
    return source


def _require_hf(folder: Path) -> None:
    if not is_hf(folder):
        raise UserError(
            f"{folder} is neither a Hugging Face folder ({CONFIG}) nor a checkpoint or run directory of ours; "
            "megaprec convert makes a checkpoint of Megatron's"
        )


def start_from(folder: Path, optimizer: ParallelAMPOptimizer) -> None:
    """Puts the weights of train.init_from into the optimizer and the layers; moments stay as they are, at zero.

    Collective over the world. UserError, before anything is changed, if a file of a checkpoint is not what was saved.
    """
    if checkpoint := find_native(folder):
        store = Store(checkpoint)
        require_intact(store, store.files_of("weight"), optimizer.world, optimizer.device)
    load_weights(Slices(open_initial(folder)), optimizer)


class Slices:
    """Reads parts of a source's logical tensors."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def read_range(self, kind: str, part: Part, first: int, last: int) -> Tensor:
        """Elements [first, last) of the flattened slice `part`."""
        key = f"{kind}/{part.name}"
        if self.source.shapes.get(key) != part.shape:
            raise UserError(f"{self.source.path} holds no {part.name} of {list(part.shape)}, which the model has")
        row = prod(part.local[1:])
        top, bottom = first // row, -(-last // row)
        above = part.start if part.dim == 0 else 0
        rows = self.source.rows(key, above + top, above + bottom)
        if part.dim:
            rows = rows.narrow(part.dim, part.start, part.local[part.dim])
        return rows.reshape(-1)[first - top * row : last - top * row]
