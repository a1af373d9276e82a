"""The runs whose sequences cannot be cut over ranks (`parallel.context`), and why."""

from collections.abc import Iterator

from megaprec.errors import Problem, UserError
from megaprec.precision.plan import PrecisionPlan, dtype_name
from models.config import ModelConfig
from parallel.sequence_cut import length_multiple

KEY = "parallel.context"


def context_problems(
    model: ModelConfig,
    plan: PrecisionPlan,
    context: int,
    length: int,
    tensor: int = 1,
    canonical: bool = False,
    head_ranks: int = 1,
) -> Iterator[Problem]:
    """Yield a line for each reason why sequences of `length` tokens cannot be cut over `context`
    ranks (context parallelism).

    tensor: the ranks over which sequence parallelism cuts them again; 1 without it.
    canonical: sums must have the same bits in every layout.
    head_ranks: tensor-parallel ranks, which share out heads.
    """
    # nothing is cut
    if context == 1:
        return
    here = f"{KEY} = {context}"
    multiple = length_multiple(context, tensor)
    if length % multiple:
        below = length // multiple * multiple
        above = below + multiple
        if tensor == 1:
            rule = f"2 x {KEY}"
        else:
            rule = f"{KEY} x the least common multiple of 2 and parallel.tensor"
        yield Problem.of(
            "model.context_length",
            length=length,
            multiple=multiple,
            rule=rule,
            here=here,
            nearest=f"{below} or {above}" if below else above,
        )
    # The attention of a user's layers sees this rank's keys only.
    if model.factory:
        yield Problem.of("model.context_factory", factory=model.factory, here=here)
    yield from _recurrent_problems(model, head_ranks, context)
    # The softmax is merged from parts, whose sums must not be rounded.
    if plan.scores != plan.sensitive:
        yield Problem.of(
            "model.context_scores",
            scores=dtype_name(plan.scores),
            here=here,
            sensitive=dtype_name(plan.sensitive),
        )
    if canonical:
        yield Problem.of("model.context_canonical", here=here)


def require_divisible_context(
    model: ModelConfig,
    plan: PrecisionPlan,
    context: int,
    length: int,
    tensor: int = 1,
    canonical: bool = False,
    head_ranks: int = 1,
) -> None:
    """Raise UserError, with a line for each reason, if sequences cannot be cut; as in
    `context_problems`."""
    problems = [*context_problems(model, plan, context, length, tensor, canonical, head_ranks)]
    if problems:
        raise UserError(*problems)


def _recurrent_problems(model: ModelConfig, tensor: int, context: int) -> Iterator[Problem]:
    """Yield a line if tensor x context ranks cannot share out the heads of the gated delta nets,
    and one if they cannot share out those of the Mamba-2 mixers: a rank computes whole sequences of
    its own heads."""
    ranks = tensor * context
    if not model.delta_net.divides(ranks):
        sizes = model.delta_net
        yield Problem.of(
            "model.context_delta_net",
            context=context,
            ranks=ranks,
            key_heads=sizes.key_heads,
            value_heads=sizes.value_heads,
        )
    if not model.mamba.divides_heads(ranks):
        mixer = model.mamba
        yield Problem.of(
            "model.context_mamba",
            context=context,
            ranks=ranks,
            heads=mixer.heads,
            groups=mixer.groups,
        )


def require_shared_heads(model: ModelConfig, tensor: int, context: int) -> None:
    """Raise UserError if `context` ranks, over which sequences are cut, cannot share out the heads
    of layers with a recurrent state that each of `tensor` tensor-parallel ranks has."""
    if context == 1:
        return
    if problems := [*_recurrent_problems(model, tensor, context)]:
        raise UserError(*problems)


def require_uncut_sequences(context: int, what: str) -> None:
    """Raise UserError if sequences are cut over `context` ranks. what: the task that needs full
    ones."""
    if context > 1:
        raise UserError.of("model.cut_sequences", key=KEY, context=context, what=what)
