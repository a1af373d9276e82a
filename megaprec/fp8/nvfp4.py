"""NVFP4: codes of four bits, a scale per block of 16 and one per tensor.

    code           E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign
    block scale    E4M3, of 16 elements along the sum; of weights of 16 x 16
    tensor scale   FP32, 6 * 448 / amax, so that the largest block scale is E4M3's largest number

The recipe of "Pretraining Large Language Models with NVFP4" (NVIDIA, 2025):

    tensor      for the product      rounding       before rounding
    weight      both                 to nearest
    input       forward              to nearest
    input       weight gradient      to nearest     random Hadamard transform over tokens
    gradient    input gradient       stochastic
    gradient    weight gradient      stochastic     random Hadamard transform over tokens

Both factors of the weight gradient are multiplied by the same orthogonal 16 x 16 matrix along the
tokens that they are summed over, which changes no sum and spreads outliers over 16 numbers. Scales
and rounding to nearest follow the formulas of Transformer Engine's reference
(`custom_recipes/quantization_nvfp4.py`), whose signs of the transform are used too. There is no
kernel: codes are held as numbers of E4M3, which has all of E2M1, and products are emulated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megaprec.comm.random import bits, keep_each, key
from megaprec.fp8.formats import E4M3, Role, cast, limit
from megaprec.fp8.quantize import Codes, amax_of, expand_blocks
from megaprec.fp8.scaling import scale_of

BLOCK = 16
LARGEST = 6.0
# of the rows of the Hadamard matrix; the same for all layers and the whole run
_SIGNS = "+++-+------+-+--"
_LARGEST_FLOAT = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Microbatch:
    """The micro-batch of a forward pass, as stochastic rounding knows it.

    step: number of the training step. first_sample: int64 [], the number of its first sample within
        the global batch.
    """

    step: int
    first_sample: Tensor


@dataclass(frozen=True)
class Rounding:
    """Stochastic rounding of the gradients of one weight's outputs.

    A number is rounded up or down by a function of the seed, the step, the weight, the micro-batch
    and the element's row and output, so that every layout with this size of a micro-batch rounds
    alike, as often as it computes the pass.
    outputs: the numbers of this rank's outputs within the logical tensors that are stacked in the
        weight, in the order of its rows.
    """

    seed: int
    name: str
    outputs: tuple[range, ...]
    microbatch: Microbatch | None = None

    def rows(self, fractions: Tensor) -> Tensor:
        """Return True for each element of a gradient [rows, outputs] that is rounded up, with the
        probabilities `fractions`."""
        return self._rounds_up(fractions, "rows")

    def columns(self, fractions: Tensor) -> Tensor:
        """Return `rows` of the transpose [outputs, rows], which has random bits of its own."""
        return self._rounds_up(fractions.t(), "columns").t()

    def _rounds_up(self, fractions: Tensor, direction: str) -> Tensor:
        """Return bool [rows, outputs], True with the probabilities `fractions`. direction: of the
        codes, each of which has random bits of its own."""
        assert self.microbatch is not None
        device = fractions.device
        random_key = key(self.seed, self.microbatch.step, self.name, direction)
        # a hash, so that samples, whose numbers are near each other, do not share rows
        first_row = bits(random_key, self.microbatch.first_sample.to(device))
        rows = first_row + torch.arange(fractions.shape[0], device=device)
        spans = [torch.arange(span.start, span.stop, device=device) for span in self.outputs]
        outputs = torch.cat(spans)
        index = bits(random_key, rows)[:, None] + outputs  # [rows, outputs]
        return keep_each(random_key, index, fractions)


def nvfp4_casts(
    x: Tensor,
    role: Role,
    reduce_max: Callable[[Tensor], None] | None = None,
    rounding: Rounding | None = None,
) -> tuple[Codes, Codes]:
    """Return the codes of x [m, k], and those of its transpose. The transpose of a weight has the
    same codes. That of another tensor goes through the Hadamard transform along m first: [k, m
    rounded up to 16].

    reduce_max: reduces amaxes [n, 1] in place to their maxima over the ranks that hold parts of x.
    rounding: None: to nearest.
    """
    if role == "weight":
        amax = amax_of(x)
        if reduce_max is not None:
            reduce_max(amax)
        codes = encode(x, amax, (BLOCK, BLOCK))
        return codes, codes.t()
    transposed = transform(x.t())
    amaxes = torch.cat([amax_of(x), amax_of(transposed)])
    if reduce_max is not None:
        reduce_max(amaxes)  # of both in one collective
    amax, transposed_amax = amaxes.split(1)  # [1, 1] each
    row_block = (1, BLOCK)
    if rounding is None:
        codes = encode(x, amax, row_block)
        return codes, encode(transposed, transposed_amax, row_block)
    codes = encode(x, amax, row_block, rounding.rows)
    transposed_codes = encode(transposed, transposed_amax, row_block, rounding.columns)
    return codes, transposed_codes


def transform(x: Tensor) -> Tensor:
    """Return x [m, k] times the random Hadamard matrix in each 16 columns, float32 [m, k rounded up
    to 16].

    The sums are made two by two, in an order that does not depend on sizes: the result is the same
    bit for bit however the rows are cut.
    """
    m, k = x.shape
    padded = F.pad(x, (0, -k % BLOCK)).float()
    num_blocks = -(-k // BLOCK)  # rounded up
    signs = [1.0 if sign == "+" else -1.0 for sign in _SIGNS]
    blocks = padded.reshape(m, num_blocks, BLOCK)
    values = blocks * torch.tensor(signs, device=x.device)
    # the fast Walsh-Hadamard transform: sums and differences of neighbouring runs of `length`
    length = 1
    while length < BLOCK:
        pairs = values.reshape(m, num_blocks, BLOCK // (2 * length), 2, length)
        first, second = pairs.unbind(3)
        values = torch.stack([first + second, first - second], 3)
        length *= 2
    return values.reshape(m, num_blocks * BLOCK) / BLOCK**0.5


def encode(
    x: Tensor,
    amax: Tensor,
    block: tuple[int, int],
    rounds_up: Callable[[Tensor], Tensor] | None = None,
) -> Codes:
    """Return x [m, k] in codes of four bits.

    amax: of the whole tensor, float32 [1, 1].
    block: rows and columns that share a scale.
    rounds_up: as in `round_e2m1`.
    """
    tensor_scale = scale_of(amax, LARGEST * limit(E4M3))
    # The product with 1 / 6, which is rounded, is Transformer Engine's.
    sixth = torch.full_like(tensor_scale, LARGEST).reciprocal()
    # Numbers are codes * block_inverse * tensor_inverse: both are stored beside the codes.
    # A block with an inf or a NaN has the scale NaN, which reaches the gradients.
    block_inverse = cast(amax_of(x, block), E4M3, tensor_scale * sixth)
    tensor_inverse = tensor_scale.reciprocal()
    # A block whose scale is rounded to zero vanishes, whatever its codes are.
    inverse = block_inverse.float() * tensor_inverse
    block_scale = inverse.reciprocal().clamp(max=_LARGEST_FLOAT)
    scaled = x.float() * expand_blocks(block_scale, block, x.shape)
    values = round_e2m1(scaled, rounds_up).to(E4M3)
    return Codes(values, block_inverse, block, tensor_inverse)


def round_e2m1(
    scaled: Tensor,
    rounds_up: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return `scaled`, float32, rounded to numbers of E2M1; beyond 6 to 6. NaN stays NaN.

    rounds_up: a function from the distances to the lower neighbour, as parts of a step, to True
        where the magnitude is rounded up; None: to nearest, ties to even.
    """
    magnitude = scaled.abs().clamp(max=LARGEST)
    # the distance between neighbours, a power of two: quotients are exact
    step = torch.where(magnitude < 4, 1.0, 2.0).where(magnitude >= 2, 0.5)
    steps = magnitude / step
    if rounds_up is None:
        rounded = steps.round()
    else:
        lower = steps.floor()
        rounded = lower + rounds_up(steps - lower)
    return (rounded * step).copysign(scaled)
