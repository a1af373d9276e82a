"""Reading of parts of a model's logical tensors, as the ranks of a layout hold them."""

from math import prod

from torch import Tensor

from megaprec.comm.layout import Part
from megaprec.errors import UserError
from tools.convert.core.finite import not_finite
from tools.convert.core.source import Source


class Slices:
    """Reader of parts of a source's logical tensors.

    not_finite: by key and location of a slice, how many of its numbers are NaN or infinite, if any
        are.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.not_finite = dict[str, int]()

    def read_range(self, kind: str, part: Part, first: int, last: int) -> Tensor:
        """Return elements [first, last) of the flattened slice `part`."""
        tensor_key = f"{kind}/{part.name}"
        shape = self.source.shapes.get(tensor_key)
        if shape != part.shape:
            problem = f"does not hold {part.name}"
            if shape:
                problem = f"holds {part.name} of {list(shape)}"
            raise UserError.of(
                "convert.megatron_range",
                path=self.source.path,
                problem=problem,
                shape=list(part.shape),
            )
        # Read the rows that have the elements, and cut the rest off.
        row_elements = prod(part.local[1:])
        top = first // row_elements
        bottom = -(-last // row_elements)
        first_row = part.start if part.dim == 0 else 0
        rows = self.source.rows(tensor_key, first_row + top, first_row + bottom)
        if part.dim:
            rows = rows.narrow(part.dim, part.start, part.local[part.dim])
        skipped = top * row_elements
        values = rows.reshape(-1)[first - skipped : last - skipped]
        if count := not_finite(values):
            self.not_finite[f"{tensor_key} {part.dim} {part.start} {first}"] = count
        return values
