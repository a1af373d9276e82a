"""Loading the weights of a model folder of any format as the first weights of a run, in any layout.

Every rank reads what it holds: rows of a tensor that is stored in megaprec's form, the whole tensor if it must be
rearranged or assembled first.
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
    """Return the model of train.init_from, its tokenizer file if there is one, and their origin. Raises UserError."""
    kind, found = format_of(folder)
    if kind == "megaprec":
        return *native_model(found), f"{found / INDEX}"
    if kind == "hf":
        return hf_model(folder), main_file(hf_tokenizer(folder)), f"{folder / CONFIG}"
    source = open_weights(folder)
    return source.model, main_file(source.tokenizer), f"{found}"


def open_initial(folder: Path) -> Source:
    """Open the folder of train.init_from and check everything except the values. Raises UserError."""
    source = open_weights(folder)
    check_tokenizer(source.tokenizer, source.model.vocab)
    return source


def open_weights(folder: Path) -> Source:
    """Open a folder without its optimizer state. Raises UserError."""
    return open_source(folder, weights_only=format_of(folder)[0] == "megatron")


def start_from(folder: Path, optimizer: ParallelAMPOptimizer) -> None:
    """Copy the weights of train.init_from into the optimizer and the layers; moments stay zero.

    Collective over the world. Raises UserError, before anything is changed, if a file of the checkpoint is damaged.
    """
    if checkpoint := checkpoint_at(folder):
        store = Store(checkpoint)
        require_intact(store, store.files_of("weight"), optimizer.world, optimizer.device)
    load_weights(Slices(open_initial(folder)), optimizer)


class Slices:
    """Reader of parts of a source's logical tensors."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def read_range(self, kind: str, part: Part, first: int, last: int) -> Tensor:
        """Return elements [first, last) of the flattened slice `part`."""
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
