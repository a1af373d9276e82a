"""Checks, when an optimizer is built, that all ranks build the same one over the same model.

Ranks that begin with other weights, clip at another norm or hold their parameters in another order
would add up gradients of different models. Under ZeRO-1 the first all-gather would even mix their
weights into one. Stages that give one name to different tensors would share a place in every state.
No later check sees it: gradients, scales and norms are then equal on all ranks.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from itertools import chain, zip_longest

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.gathered_texts import gather_texts
from megaprec.comm.layout import has_layout, layout_of, parameters_of
from megaprec.comm.tensor_digests import INTEGERS
from megaprec.errors import Problem, UserError
from megaprec.optim.ranks import Ranks
from megaprec.optim.torch_wrappers import is_dtensor
from megaprec.precision.plan import PrecisionPlan

_NUM_SLOTS = 2**16  # for digests of names: a sum of 256 KiB, in which chance hits are rare


@dataclass(frozen=True)
class _Facts:
    """Facts that are compared between ranks.

    stage: the pipeline rank; parameters are compared within a stage only.
    settings: by name, as text.
    parameters: "name shape" of each logical tensor, in order.
    """

    stage: int
    settings: dict[str, str]
    parameters: list[str]


def require_equal_on_all_ranks(
    model_parts: Sequence[nn.Module],
    ranks: Ranks,
    plan: PrecisionPlan,
    settings: Mapping[str, object],
) -> None:
    """Raise UserError on every rank if the ranks differ in what they train or how. Collective over
    the world."""
    setting_texts = {name: _to_text(value) for name, value in settings.items()}
    for name, text in _plan_fields(plan):
        setting_texts[f"plan.{name}"] = text
    local_facts = _Facts(ranks.pp.rank, setting_texts, list(_describe_parameters(model_parts)))
    # digests first: a rank of thousands does not read the facts of all others if they agree
    if _differ(local_facts, ranks):
        text_of_rank = json.dumps(asdict(local_facts))
        texts = gather_texts(text_of_rank.encode(), ranks.world, ranks.device)
        all_facts = [_Facts(**json.loads(text)) for text in texts]
        raise UserError(*_differences(all_facts))
    _require_distinct_names(model_parts, ranks)
    require_same_weights(model_parts, ranks, (ranks.dp, ranks.tp), "begin with")


def _require_distinct_names(model_parts: Sequence[nn.Module], ranks: Ranks) -> None:
    """Raise UserError, on every rank of a pipeline, if stages give one name to different tensors.

    A state would hold one of them, or their sum. Tied parameters have one name on purpose.
    Collective over pp.
    """
    if ranks.pp.size == 1:
        return
    local_names = _untied_names(model_parts)
    # Usually one small sum tells that all is well: equal names of two stages share a slot. So may
    # different ones, and then the names themselves are compared.
    slots = torch.zeros(_NUM_SLOTS, dtype=torch.int32)
    slots[[_slot_of(name) for name in local_names]] = 1
    stages_per_slot = ranks.pp.sum_(slots.to(ranks.device))
    if stages_per_slot.amax() < 2:
        return
    local_text = json.dumps([ranks.pp.rank, local_names])
    texts = gather_texts(local_text.encode(), ranks.pp, ranks.device)
    stage_of_name: dict[str, int] = {}
    for stage, names_of_stage in map(json.loads, texts):
        for name in names_of_stage:
            if name in stage_of_name:
                raise UserError.of(
                    "optimizer.name_on_two_stages",
                    name=name,
                    stages=stage_of_name[name],
                    stage=stage,
                )
            stage_of_name[name] = stage


def _untied_names(model_parts: Sequence[nn.Module]) -> list[str]:
    """Return the logical names of all parameters that one stage alone has, sorted."""
    names = set[str]()
    for model_part in model_parts:
        for parameter in filter(has_layout, model_part.parameters()):
            layout = layout_of(parameter)
            if not layout.tied:
                names.update(logical.name for logical in layout.parts)
    return sorted(names)


def _slot_of(name: str) -> int:
    digest = blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % _NUM_SLOTS


def _differ(local_facts: _Facts, ranks: Ranks) -> bool:
    """Return True on all ranks if two differ in their settings, or two of a stage in their
    parameters. Collective over the world."""
    # what this rank gives for stages of other ranks; below every digest
    absent = torch.iinfo(torch.int64).min
    # one digest of the settings, and one of the parameters of each stage
    digests = torch.full((1 + ranks.pp.size,), absent, device=ranks.device)
    digests[0] = _digest(local_facts.settings)
    digests[1 + local_facts.stage] = _digest(local_facts.parameters)
    # Digests are equal if the largest is the smallest. ~ turns the order of integers around, so
    # the smallest comes from a maximum, in which `absent` must stay the lowest.
    inverse = torch.where(digests == absent, digests, ~digests)
    largest = ranks.world.max_(digests)
    smallest = ~ranks.world.max_(inverse)
    differs = (largest != smallest) & (largest != absent)
    return bool(differs.any())


def _digest(value: object) -> int:
    text = json.dumps(value)
    hashed = blake2b(text.encode(), digest_size=7)
    return int.from_bytes(hashed.digest(), "little")


def _to_text(value: object) -> str:
    """Return a value as text. An object that has none but its address is described by its class and
    its plain attributes."""
    if type(value).__repr__ is not object.__repr__:
        return repr(value)
    plain = {
        name: attribute
        for name, attribute in vars(value).items()
        if isinstance(attribute, str | int | float | bool)
    }
    return f"{type(value).__name__} {plain}"


def _plan_fields(plan: PrecisionPlan) -> Iterator[tuple[str, str]]:
    """Yield the fields of a plan as text, without functions, whose text differs from process to
    process."""
    for field in fields(plan):
        # the origin of a field may be a file of one rank's host
        if field.name == "origin":
            continue
        setting = getattr(plan, field.name)
        if field.name == "fp8" and setting is not None:
            recipe = {each.name: getattr(setting, each.name) for each in fields(setting)}
            setting = {name: value for name, value in recipe.items() if not callable(value)}
        yield field.name, str(setting)


def _describe_parameters(model_parts: Sequence[nn.Module]) -> Iterator[str]:
    """Yield name and shape of the logical tensors, in order, that every rank of a pipeline stage
    has."""
    for layout in map(layout_of, parameters_of(model_parts)):
        if not layout.expert:  # other ranks of the stage have other experts
            yield from (f"{part.name} {list(part.shape)}" for part in layout.parts)


def _differences(all_facts: Sequence[_Facts]) -> list[Problem]:
    """Return a problem for each setting, and for the parameters of each stage, that ranks do not
    share."""
    problems: list[Problem] = []
    for name in all_facts[0].settings:
        # without repetition, in order
        values = list(dict.fromkeys(facts.settings.get(name) for facts in all_facts))
        if len(values) > 1:
            first_value, other_value, *_ = values
            problems.append(
                Problem.of(
                    "optimizer.settings_differ",
                    name=name,
                    first=first_value,
                    other=other_value,
                )
            )
    parameters_of_stage: dict[int, list[str]] = {}
    different_stages = set[int]()
    for facts in sorted(all_facts, key=lambda facts: facts.stage):
        stage = facts.stage
        first = parameters_of_stage.setdefault(stage, facts.parameters)
        if facts.parameters == first or stage in different_stages:
            continue
        different_stages.add(stage)
        entry, other_entry = _first_difference(first, facts.parameters)
        problems.append(
            Problem.of("optimizer.parameters_differ", stage=stage, mine=entry, theirs=other_entry)
        )
    return problems


def _first_difference(first: Sequence[str], second: Sequence[str]) -> tuple[str, str]:
    """Return the first entries in which two different lists differ; "none" past the end of one."""
    for entry, other_entry in zip_longest(first, second, fillvalue="none"):
        if entry != other_entry:
            return entry, other_entry
    raise AssertionError("the lists are equal")


def require_same_weights(
    model_parts: Sequence[nn.Module],
    ranks: Ranks,
    axes: Sequence[Axis],
    verb: str,
) -> None:
    """Raise UserError, on every rank, if the replicas of a model have different weights.

    axes: dp, over which every parameter, trained or frozen, is compared; tp, over which replicated
    ones are. Experts on ranks of their own are not compared. verb: what ranks do with different
    weights, in the words of the error, such as "begin with". Collective over the world.
    """
    if ranks.world.size == 1:
        return
    problem: Problem | None = None
    for axis in axes:
        is_dp = axis is ranks.dp
        parameters = _replicated_parameters(model_parts, only_uncut=not is_dp)
        if axis.size == 1 or not parameters:
            continue
        # compared in any case: the others of the axis wait for this rank
        name = _first_differing(parameters, axis, ranks.device)
        if name and problem is None:
            problem = Problem.of("optimizer.weights_differ", axis=axis.name, verb=verb, name=name)
    has_problem = torch.tensor(float(problem is not None), device=ranks.device)
    if ranks.world.max_(has_problem):
        raise UserError(problem or Problem.of("optimizer.weights_differ_elsewhere", verb=verb))


def _replicated_parameters(
    model_parts: Sequence[nn.Module], only_uncut: bool
) -> list[nn.Parameter]:
    """Return the parameters that all dp ranks have alike, trained and frozen ones: all but experts,
    DTensors and those without a layout. only_uncut: without those that are cut over tp."""
    # a tied parameter may be in several parts
    every = dict.fromkeys(chain.from_iterable(part.parameters() for part in model_parts))
    replicated: list[nn.Parameter] = []
    for parameter in every:
        if not has_layout(parameter) or is_dtensor(parameter):
            continue
        layout = layout_of(parameter)
        is_cut = any(part.dim is not None for part in layout.parts)
        if not layout.expert and not (only_uncut and is_cut):
            replicated.append(parameter)
    return replicated


def _first_differing(parameters: Sequence[nn.Parameter], axis: Axis, device: torch.device) -> str:
    """Return the name of the first parameter that ranks of `axis` do not have alike; empty if there
    is none. Collective over `axis`."""
    # of bits, not of values: NaNs are compared too, and a sum of them is no NaN
    sums = torch.stack([_sum_of_bits(parameter).to(device) for parameter in parameters])
    largest = axis.max_(sums.clone())
    # ~ turns the order of integers around: the smallest comes from a maximum
    smallest = ~axis.max_(~sums)
    differences = (largest != smallest).tolist()
    for parameter, is_different in zip(parameters, differences, strict=True):
        if is_different:
            return layout_of(parameter).parts[0].name
    return ""


def _sum_of_bits(parameter: nn.Parameter) -> Tensor:
    """Return the sum of the elements' bits as whole numbers: int64 [], the same in any order of
    addition."""
    values = parameter.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.view(INTEGERS[values.itemsize]).sum(dtype=torch.int64)
