"""Weights of a model's folder, of any format that is read, as the first weights of a run, in any layout.

Every rank reads what it holds: rows of a tensor that is stored as ours is, the whole tensor where it has to be
rearranged or put together first.
"""

from math import prod
from pathlib import Path

from torch import Tensor

from megaprec.checkpoint.atomic import checkpoint_at
from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.reader import INDEX, Store
from megaprec.checkpoint.save_load import load_weights
from megaprec.comm.layout import Part
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from models.config import ModelConfig
from tools.convert.core.source import Source
from tools.convert.formats import format_of, open_source
from tools.convert.hf.folder import CONFIG, hf_model, hf_tokenizer
from tools.convert.hf.vocabulary import check_tokenizer, main_file
from tools.convert.native import native_model


def initial_model(folder: Path) -> tuple[ModelConfig, Path | None, str]:
    """The model of train.init_from, its tokenizer's file if it has one, and what says so. Raises UserError."""
    kind, found = format_of(folder)
    if kind == "megaprec":
        return *native_model(found), f"{found / INDEX}"
    if kind == "hf":
        return hf_model(folder), main_file(hf_tokenizer(folder)), f"{folder / CONFIG}"
    source = open_weights(folder)
    return source.model, main_file(source.tokenizer), f"{found}"


def open_initial(folder: Path) -> Source:
    """Opens the folder of train.init_from and looks at all of it but the values. Raises UserError."""
    source = open_weights(folder)
    check_tokenizer(source.tokenizer, source.model.vocab)
    return source


def open_weights(folder: Path) -> Source:
    """Opens a folder without looking at an optimizer's state. Raises UserError."""
    return open_source(folder, weights_only=format_of(folder)[0] == "megatron")


def start_from(folder: Path, optimizer: ParallelAMPOptimizer) -> None:
    """Puts the weights of train.init_from into the optimizer and the layers; moments stay as they are, at zero.

    Collective over the world. UserError, before anything is changed, if a file of a checkpoint is not what was saved.
    """
    if checkpoint := checkpoint_at(folder):
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
