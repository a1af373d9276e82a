"""Weights of a Hugging Face folder as the first weights of a run, in any layout.

Every rank reads what it holds: rows of a tensor that is stored as ours is, the whole tensor where it has to be
rearranged first.
"""

from math import prod
from pathlib import Path

from torch import Tensor

from megaprec.checkpoint.state import load_weights
from megaprec.errors import UserError
from megaprec.layout import Part
from megaprec.optimizer import ParallelAMPOptimizer
from tools.convert.hf import is_hf, open_hf
from tools.convert.source import Source
from tools.convert.vocabulary import check_tokenizer


def open_initial(folder: Path) -> Source:
    """Opens the folder of train.init_from and looks at all of it but the values. Raises UserError."""
    if not is_hf(folder):
        raise UserError(f'train.init_from = "{folder}" is no Hugging Face folder: it has no config.json')
    source = open_hf(folder)
    check_tokenizer(source.tokenizer, source.model.vocab)
    return source


def start_from(folder: Path, optimizer: ParallelAMPOptimizer) -> None:
    """Puts the folder's weights into the optimizer and the layers; moments stay as they are, at zero."""
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
