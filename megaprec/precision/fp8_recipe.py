"""The FP8 recipe: how matrix products are computed in FP8 or in NVFP4, as one frozen value of the
precision plan.

E4M3 has more mantissa and its largest number is 448; E5M2 has more range and its largest number is
57344. Neither has enough range for a whole model, so every tensor is multiplied by its own scale
before it is rounded. Recipes differ in how many elements share a scale and in which numbers the
largest magnitude (amax) is taken from: `SCALE_KINDS`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from megaprec.errors import Problem, UserError
from megaprec.kinds import wrong_kinds

Kind = Literal["delayed", "current", "rowwise", "blockwise", "mx", "nvfp4"]
Backend = Literal["torch", "transformer_engine"]
ALL = 0  # rows or columns of a block: all of them
LARGEST_MARGIN = 32
"""Of either sign. E5M2, the wider format, has 32 powers of two: scales that are farther from those
that an amax requires round all of a tensor to zero, or to its largest number."""


class ScaleKind(NamedTuple):
    """A kind of recipe: how many elements of a matrix share a scale, and where it comes from.

    said: a description of the scales for users, in the help of the key.
    block: rows and columns that share a scale. weight_block: those of a weight.
    multiples: of (outputs, inputs) of a weight that its products need: tensor cores read numbers in
        groups, and blocks are whole.
    keeps_history: whether scales come from the amaxes of earlier passes.
    power_2: whether scales are powers of two whatever the recipe says, of eight-bit codes in E8M0.
    four_bits: whether codes have four bits, and the tensor a scale of its own besides
        (`megaprec.fp8.nvfp4`).
    usual_format: the format that "auto" stands for.
    speed: of products on a GPU, for forecasts: how much faster they are than the mean of FP8's. One
        scale for each tensor costs least, and tensor cores add up blocks of 128 in two steps.
    """

    said: str
    block: tuple[int, int]
    weight_block: tuple[int, int]
    multiples: tuple[int, int]
    keeps_history: bool = False
    power_2: bool = False
    four_bits: bool = False
    usual_format: Literal["hybrid", "e4m3"] = "hybrid"
    speed: float = 1.0

    @property
    def per_tensor(self) -> bool:
        """Return True if all of a tensor has one scale."""
        return self.block == (ALL, ALL)

    def block_of(self, is_weight: bool) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        return self.weight_block if is_weight else self.block

    @property
    def differs_for_weights(self) -> bool:
        """Return True if a weight has other blocks than activations and gradients."""
        return self.weight_block != self.block

    def serves_both(self, is_weight: bool) -> bool:
        """Return True if the codes of the transposed matrix are the transposed codes."""
        rows, columns = self.block_of(is_weight)
        return rows == columns


_TENSOR = (ALL, ALL)
_EIGHT_BITS = (8, 16)
SCALE_KINDS: Mapping[Kind, ScaleKind] = {
    "delayed": ScaleKind(
        "one per tensor, from the amax (largest magnitude) of earlier passes",
        _TENSOR,
        _TENSOR,
        _EIGHT_BITS,
        keeps_history=True,
    ),
    "current": ScaleKind("one per tensor, from the tensor itself", _TENSOR, _TENSOR, _EIGHT_BITS),
    "rowwise": ScaleKind("one per row", (1, ALL), (1, ALL), _EIGHT_BITS, speed=0.95),
    # scales of few elements leave range enough for e4m3
    "blockwise": ScaleKind(
        "one per block of 128 (128 x 128 for weights)",
        (1, 128),
        (128, 128),
        (128, 128),
        usual_format="e4m3",
        speed=0.85,
    ),
    "mx": ScaleKind(
        "one power of two per 32 elements",
        (1, 32),
        (1, 32),
        (32, 32),
        power_2=True,
        usual_format="e4m3",
    ),
    "nvfp4": ScaleKind(
        "four-bit codes instead (NVFP4, emulated), one per 16 elements and one per tensor",
        (1, 16),
        (16, 16),
        (16, 16),
        power_2=True,
        four_bits=True,
    ),
}
EIGHT_BIT_KINDS: Sequence[Kind] = [kind for kind, row in SCALE_KINDS.items() if not row.four_bits]
"""The kinds whose codes are FP8."""


@dataclass(frozen=True)
class FP8Recipe:
    """The settings of the FP8 products of a run; see the module's docstring for `kind`.

    format: "hybrid" is E4M3 in the forward pass and E5M2 for gradients; "e4m3" is E4M3 for all
        tensors. "auto", which a recipe replaces by one of these, is "e4m3" for `blockwise` and
        `mx`, whose scales of few elements leave range enough, and "hybrid" for the others, as in
        Transformer Engine. NVFP4 has one format, E2M1.
    margin: delayed scales are 2**margin lower than the amax requires, which leaves room for the
        amax to grow. At most LARGEST_MARGIN, of either sign.
    history_length: number of past amaxes that determine a delayed scale.
    amax_algo: which amax of the history determines the scale, or a function from the histories of n
        tensors [length, n], the newest last, to amaxes [n].
    history: when the amax histories of delayed scaling advance. "step": once a step, so that all
        micro-batches of a step share their scales. "te": after each forward pass of a micro-batch,
        and for gradients after each backward pass, as in Transformer Engine; a non-finite amax then
        stays in the window, and the scale is unchanged until that amax leaves the window.
    scale_algo: function (amaxes [n], previous scales [n], largest numbers of the formats [n],
        recipe) -> delayed scales [n], used instead of the formula of `megaprec.fp8.scaling`; can be
        set only from Python.
    reduce_amax: delayed amaxes are reduced over all ranks of a pipeline stage; if False, over its
        tensor-parallel ranks only. reduce_over: "world" and "stage" give the same result, because
        no two stages share a tensor.
    power_2_scales: scales are rounded down to powers of two.
    parameters: weights are stored in FP8 only; the optimizer's masters are their only copy in
        higher precision.
    weight_gradients: the products that compute weight gradients are in FP8 too.
    dot_product_attention, multi_head_attention: the two products of attention, or everything
        between attention's linear layers, are in FP8.
    first_layers, last_layers: number of decoder layers at the start and the end that stay in the
        plan's compute dtype.
    wide: products with a weight whose logical name matches one of these patterns (`fnmatch`) stay
        in that dtype too.
    pad: weights whose sizes FP8 products do not support are padded with zeros; if False, they use
        the compute dtype.
    calibrating: amaxes are recorded, but products are computed in the plan's compute dtype.
    calibrate: number of first steps with `calibrating`.
    backend: the library that casts and multiplies where a tensor has one scale: torch, or
        Transformer Engine, which must be installed (`megaprec.fp8.transformer_engine`). Scales and
        histories are computed here in either case.
    """

    kind: Kind = "delayed"
    format: Literal["auto", "hybrid", "e4m3"] = "auto"
    margin: int = 0
    history_length: int = 1024
    amax_algo: Literal["max", "most_recent"] | Callable[[Tensor], Tensor] = "max"
    scale_algo: "Callable[[Tensor, Tensor, Tensor, FP8Recipe], Tensor] | None" = None
    history: Literal["step", "te"] = "step"
    reduce_amax: bool = True
    reduce_over: Literal["world", "stage"] = "world"
    power_2_scales: bool = False
    parameters: bool = False
    weight_gradients: bool = True
    dot_product_attention: bool = False
    multi_head_attention: bool = False
    first_layers: int = 0
    last_layers: int = 0
    wide: tuple[str, ...] = ()
    pad: bool = False
    calibrating: bool = False
    calibrate: int = 0
    backend: Backend = "torch"

    def __post_init__(self) -> None:
        if wrong := wrong_kinds(self):
            raise UserError(*(f"fp8.{line}" for line in wrong))
        if self.format == "auto":
            object.__setattr__(self, "format", self.scales.usual_format)
        problems = [*self._problems_of_delayed_scaling(), *self._problems_of_history()]
        problems += self._other_problems()
        if problems:
            raise UserError(*(problem.within("fp8.") for problem in problems))

    @property
    def scales(self) -> ScaleKind:
        """Return the row of this recipe's kind."""
        return SCALE_KINDS[self.kind]

    @property
    def repeatable(self) -> bool:
        """Return True if a pass can be computed again, or in another order, with the same scales.

        With `history = "te"` every micro-batch changes the scales of the next one: what is
        recomputed, replayed or split into other micro-batches would be cast with other scales.
        """
        return self.history == "step"

    def _problems_of_delayed_scaling(self) -> Iterator[Problem]:
        """Yield a line for each setting of delayed scaling that is wrong, or set without it."""
        if self.history_length < 1:
            yield Problem.of("fp8.history_length", history_length=self.history_length)
        if self.scales.keeps_history:
            if abs(self.margin) > LARGEST_MARGIN:
                yield Problem.of("fp8.margin_range", margin=self.margin, largest=LARGEST_MARGIN)
            return
        # scales of other kinds take nothing from earlier steps
        if self.margin:
            yield Problem.of("fp8.margin", margin=self.margin, kind=self.kind)
        if self.calibrate:
            yield Problem.of("fp8.calibrate", calibrate=self.calibrate, kind=self.kind)
        if self.history != "step":
            yield Problem.of("fp8.history_kind", history=self.history, kind=self.kind)

    def _problems_of_history(self) -> Iterator[Problem]:
        """Yield a line for each setting that cannot go with a history that advances within a
        step."""
        if self.history == "step":
            return
        if self.parameters or self.calibrate or self.calibrating:
            yield Problem.of("fp8.history_weights", history=self.history)
        if callable(self.amax_algo):
            yield Problem.of("fp8.history_function", history=self.history)

    def _other_problems(self) -> Iterator[Problem]:
        """Yield a line for each wrong setting that any recipe may have."""
        if self.parameters and (self.calibrate or self.calibrating):
            yield Problem.of("fp8.parameters_calibrated")
        if min(self.first_layers, self.last_layers) < 0:
            yield Problem.of(
                "fp8.negative_layers", first_layers=self.first_layers, last_layers=self.last_layers
            )
        if self.backend != "torch" and not self.scales.per_tensor:
            yield Problem.of("fp8.backend_kind", backend=self.backend, kind=self.kind)
        if self.parameters and self.scales.four_bits:
            yield Problem.of("fp8.nvfp4_parameters")
        # padded rows of a slice would be others in another layout, and so would their blocks
        if self.pad and self.scales.four_bits:
            yield Problem.of("fp8.nvfp4_pad")
