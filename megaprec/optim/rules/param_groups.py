"""The optimizer's parameter groups: factors of learning rate and weight decay by logical name.

    Group("*.bias", lr=2.0)                   twice the learning rate for biases
    Group("embedding.*", weight_decay=0.0)    an embedding that does not decay
    Group("*norm*", all_dims=True)            norms that decay too

Both are factors of the optimizer's own values. The first group that matches a logical tensor
applies; a factor that it leaves out is 1. Biases, norms and all other tensors with fewer than two
dims do not decay, whatever the factor, unless their group says `all_dims`. Under muP a tensor has
factors of its own besides (`megaprec.optim.rules.width`), and both are multiplied. Groups belong to
the run and not to a checkpoint, which stores state by logical name: a resumed run may have other
groups.

Parameters that share factors form a group in torch's format, in which schedulers read and write
learning rates: its "lr" and "weight_decay" are the effective values, including the factors. The
learning rate has one source: these groups if the optimizer was built with `lr`, and the caller of
each step otherwise. In the second case no group has an "lr", and reading it, as a scheduler does,
raises an error that says so.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from operator import is_
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from megaprec.comm.layout import AS_BASE, Part, layout_of
from megaprec.errors import UserError
from megaprec.kinds import NamedArguments, is_number
from megaprec.optim.names_elsewhere import GROUP
from megaprec.optim.rules.update_rules import SGD, AdamW, Step, UpdateRule
from megaprec.optim.rules.width import width_rate
from megaprec.optim.setting_ranges import require_clip, require_rates
from megaprec.optim.state.flat_buffer import Buffer


@dataclass(frozen=True)
class Group(NamedArguments):
    """Factors for the logical tensors that match a pattern.

    pattern: of logical names, with `fnmatch`'s wildcards.
    lr, weight_decay: factors; None for 1.
    all_dims: the weight decay also applies to tensors with fewer than two dims.
    """

    ELSEWHERE: ClassVar[Mapping[str, str]] = GROUP

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None
    all_dims: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise UserError.of("optimizer.group_pattern", pattern=self.pattern)
        factor_of_name = (("lr", self.lr), ("weight_decay", self.weight_decay))
        for name, factor in factor_of_name:
            if factor is None:
                continue
            if not is_number(factor) or factor < 0:
                raise UserError.of(
                    "optimizer.group_factor", name=name, factor=factor, pattern=self.pattern
                )


class Factors(NamedTuple):
    """Factors of learning rate and weight decay."""

    lr: float
    weight_decay: float


NO_FACTORS = Factors(1.0, 1.0)  # of a tensor that the optimizer's own values apply to


@dataclass(frozen=True)
class FactorSpan:
    """Elements [start, stop) of this rank's slice of a buffer, and the factors that they share."""

    start: int
    stop: int
    factors: Factors


def factors(part: Part, groups: Sequence[Group], rule: UpdateRule | None = None) -> Factors:
    """Return the factors of learning rate and weight decay for a logical tensor: those of its
    group, times those of muP. rule: the update rule, which decides those of muP; AdamW unless
    given."""
    of_group = _group_factors(part, groups)
    if part.growth == AS_BASE:  # as wide as in muP's base model, or no muP
        return of_group
    width_factor = width_rate(part, rule or AdamW())
    lr = of_group.lr * width_factor
    # A step shrinks a weight by rate times decay, which is then the same at all widths.
    weight_decay = of_group.weight_decay / width_factor
    return Factors(lr, weight_decay)


def _group_factors(part: Part, groups: Sequence[Group]) -> Factors:
    """Return the factors of the first group that matches a logical tensor; those of no group if
    none does."""
    is_vector = len(part.shape) < 2
    for group in groups:
        if fnmatchcase(part.name, group.pattern):
            lr = 1.0 if group.lr is None else group.lr
            decay = 1.0 if group.weight_decay is None else group.weight_decay
            if is_vector and not group.all_dims:
                decay = 0.0
            return Factors(lr, decay)
    return Factors(1.0, 0.0 if is_vector else 1.0)


def in_order_of_factors(
    parameters: Sequence[nn.Parameter], groups: Sequence[Group], rule: UpdateRule | None = None
) -> list[nn.Parameter]:
    """Return the parameters, those with equal factors side by side, so that `factor_spans` cuts a
    buffer of them into few spans. rule: as in `factors`."""
    # by the factors of each logical tensor that a parameter consists of
    by_factors: dict[tuple[Factors, ...], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        parts = layout_of(parameter).parts
        part_factors = tuple(factors(part, groups, rule) for part in parts)
        by_factors[part_factors].append(parameter)
    return list(chain.from_iterable(by_factors.values()))


def factor_spans(
    buffer: Buffer, groups: Sequence[Group], rule: UpdateRule | None = None
) -> Iterator[FactorSpan]:
    """Yield this rank's slice of the buffer, cut where the factors change.

    Padding belongs to the slice before it, because it holds only zeros. rule: as in `factors`.
    """
    # the spans of equal factors in the whole buffer, in order
    span_starts: list[int] = []
    factors_of_spans: list[Factors] = []
    for piece in buffer.pieces:
        # this rank has nothing of the tensor
        if piece.start == piece.stop:
            continue
        piece_factors = factors(piece.part, groups, rule)
        if not factors_of_spans or factors_of_spans[-1] != piece_factors:
            span_starts.append(piece.start)
            factors_of_spans.append(piece_factors)
    span_stops = [*span_starts[1:], buffer.size]
    # strict=False: a buffer that holds only padding has no span
    spans = zip(span_starts, span_stops, factors_of_spans, strict=False)
    for span_start, span_stop, span_factors in spans:
        # what of the span lies in this rank's slice
        start = max(span_start, buffer.start)
        stop = min(span_stop, buffer.stop)
        if start < stop:
            start_in_slice = start - buffer.start
            stop_in_slice = stop - buffer.start
            yield FactorSpan(start_in_slice, stop_in_slice, span_factors)


StepOf = Callable[[Factors], Step]  # the numbers of a step, by the factors of a group


class Rates(NamedTuple):
    """Effective learning rate and weight decay of a group in one step."""

    lr: float
    weight_decay: float


class ParamGroup(dict[str, Any]):
    """A group as torch.optim has them: "params", "weight_decay" and, if the optimizer was built
    with one, "lr".

    Beside an "lr" it has the option of the update rule that torch's schedulers cycle, see
    `cycled_options`.
    members: the parameters that the optimizer updates by these rates, whatever is done to "params".
    cycled: the rule's own value of that option, by name.
    """

    members: tuple[nn.Parameter, ...] = ()
    cycled: Mapping[str, Any] = MappingProxyType({})

    def __missing__(self, key: str) -> Any:
        if key == "lr":
            raise UserError.of("optimizer.rate_missing")
        raise KeyError(key)


Groups = Mapping[Factors, ParamGroup]


def cycled_options(rule: UpdateRule) -> dict[str, Any]:
    """Return the option of a rule that torch's OneCycleLR and CyclicLR cycle, as torch's optimizers
    call it."""
    if type(rule) is AdamW:
        return {"betas": tuple(rule.betas)}
    if type(rule) is SGD and rule.momentum:
        return {"momentum": rule.momentum}
    return {}


def param_groups(
    parameters: Iterable[nn.Parameter],
    groups: Sequence[Group],
    lr: float | None,
    weight_decay: float,
    options: Mapping[str, Any] = MappingProxyType({}),
    rule: UpdateRule | None = None,
) -> dict[Factors, ParamGroup]:
    """Return a group for each pair of factors of learning rate and weight decay. options:
    `cycled_options`. rule: the update rule, AdamW unless given.

    The first group has factors 1, even on a rank that has no such parameter. A parameter of several
    logical tensors lies in the group of the first tensor's factors; the groups of the other
    tensors' factors exist too.
    """
    made: dict[Factors, ParamGroup] = {}

    def group_with(group_factors: Factors) -> ParamGroup:
        """Return the group of these factors, made when it is first asked for."""
        if group_factors not in made:
            decay = weight_decay * group_factors.weight_decay
            group = ParamGroup(params=[], weight_decay=decay)
            if lr is not None:
                group_lr = lr * group_factors.lr
                group.update(lr=group_lr, **options)
                group.cycled = options
            made[group_factors] = group
        return made[group_factors]

    group_with(NO_FACTORS)  # the first, whose rate is that of the step
    for parameter in parameters:
        # a group for the factors of each logical tensor; the parameter is listed in the first
        groups_of_parts: list[ParamGroup] = []
        for part in layout_of(parameter).parts:
            part_factors = factors(part, groups, rule)
            groups_of_parts.append(group_with(part_factors))
        first_group = groups_of_parts[0]
        first_group["params"].append(parameter)
    for group in made.values():
        group.members = tuple(group["params"])
    return made


def require_unreplaced_groups(current: Sequence[object], built: Groups) -> None:
    """Raise UserError unless `current`, the list that everybody sees, has the optimizer's own
    groups as they were built."""
    built_groups = list(built.values())
    same_groups = _are_identical(current, built_groups)
    same_params = all(_are_identical(group["params"], group.members) for group in built_groups)
    if not same_groups or not same_params:
        raise UserError.of("optimizer.groups_replaced")


def _are_identical(current: Sequence[object], built: Sequence[object]) -> bool:
    """Return True if both have the same objects, which need not have an equality."""
    return len(current) == len(built) and all(map(is_, current, built))


def step_rates(groups: Groups, lr: float | None) -> dict[Factors, Rates]:
    """Return learning rate and weight decay by factors. lr: of this step, for an optimizer that was
    built without.

    Raises UserError unless the rate is given once, and for an option of the update rule, which is
    none of a group.
    """
    # torch's optimizers take a closure in this place
    if callable(lr):
        raise UserError.of("optimizer.rate_is_closure")
    _require_no_rule_options(groups)
    if lr is not None:
        if any("lr" in group for group in groups.values()):
            raise UserError.of("optimizer.rate_twice")
        require_rates(lr=lr)
    rates: dict[Factors, Rates] = {}
    for group_factors, group in groups.items():
        decay = group["weight_decay"]
        if lr is None:  # the groups have it, and a scheduler may have changed it
            group_lr = group["lr"]
            require_rates(weight_decay=decay, lr=group_lr)
        else:
            group_lr = lr * group_factors.lr
            require_rates(weight_decay=decay)
        rates[group_factors] = Rates(float(group_lr), float(decay))
    return rates


def _require_no_rule_options(groups: Groups) -> None:
    """Raise UserError for an option of torch's optimizers that someone has put into a group."""
    unread: list[str] = []
    for group in groups.values():
        unread_options = _options_of_torch() - group.cycled.keys()
        options = group.keys() & unread_options
        unread += [f"{option} = {group[option]!r}" for option in options]
    if unread:
        first_group = groups[NO_FACTORS]
        read = ", ".join(["lr", "weight_decay", *first_group.cycled])
        raise UserError.of("optimizer.group_option_unread", unread=min(unread), read=read)


def step_rules(groups: Groups, rule: UpdateRule) -> dict[Factors, UpdateRule]:
    """Return the update rule of each group, with the option that a scheduler has changed: AdamW's
    betas or SGD's momentum. Raises UserError for a value that the rule cannot have.
    """
    rules: dict[Factors, UpdateRule] = {}
    for group_factors, group in groups.items():
        changed = _changed_options(group)
        group_rule = rule
        if changed:
            group_rule = replace(rule, **changed)  # type: ignore[type-var]
        rules[group_factors] = group_rule
        if "momentum" in changed and not changed["momentum"]:
            # such a rule has no moments, but those of the optimizer are allocated
            raise UserError.of("optimizer.momentum_zero")
    return rules


def _changed_options(group: ParamGroup) -> dict[str, Any]:
    """Return the cycled options of a group that are not the rule's own."""
    changed: dict[str, Any] = {}
    for name, original in group.cycled.items():
        value = group.get(name, original)
        if isinstance(value, list):  # as a loaded JSON has it
            value = tuple(value)
        if value != original:
            changed[name] = value
    return changed


def describe_settings(groups: Groups, rates: Mapping[Factors, Rates], clip: float) -> list[str]:
    """Return, as lines of text, what must be equal on all ranks of a stage in one step: the
    rates of each group, its options that a scheduler has changed, and the largest norm.

    Raises UserError if a loop has set the largest norm to what is no norm.
    """
    require_clip(clip)
    lines: list[str] = []
    # nine digits tell any two numbers of FP32 apart
    for group_rates in rates.values():
        lines.append(f"lr = {group_rates.lr:.9g}, weight_decay = {group_rates.weight_decay:.9g}")
    for group in groups.values():
        changed = _changed_options(group)
        lines += [f"{name} = {value}" for name, value in changed.items()]
    return [*lines, f"clip = {clip}"]


@cache
def _options_of_torch() -> frozenset[str]:
    """Return the options of torch's optimizers that torch reads from the groups in each step, and
    that are not here."""
    names = set[str]()
    for member in vars(torch.optim).values():
        if isinstance(member, type) and issubclass(member, torch.optim.Optimizer):
            signature = inspect.signature(member)
            names.update(signature.parameters)
    # what a group has here too, and arguments that are no options
    not_options = {"params", "lr", "weight_decay", "defaults", "args", "kwargs"}
    return frozenset(names - not_options)


def saved_groups(groups: Groups) -> list[dict[str, Any]]:
    """Return the groups that have a learning rate as plain values, with the factors that identify
    each group.

    An option of the rule is among them only where a scheduler has changed it: a resumed run may
    have another rule.
    """
    saved: list[dict[str, Any]] = []
    for group_factors, group in groups.items():
        if "lr" in group:
            changed = _changed_options(group)
            unchanged = group.cycled.keys() - changed.keys()
            left_out = {"params", *unchanged}
            values = {key: value for key, value in group.items() if key not in left_out}
            saved.append({"factors": list(group_factors), **values})
    return saved


def load_groups(saved: Iterable[dict[str, Any]], groups: Groups) -> None:
    """Load saved rates, by factors. Groups that are new in this run, and groups without "lr", stay
    unchanged."""
    for values in saved:
        saved_factors = Factors(*values["factors"])
        group = groups.get(saved_factors)
        if group is not None and "lr" in group:
            options = {key: value for key, value in values.items() if key != "factors"}
            group.update(options)
