"""Containers of tensors: every kind comes back as itself, with each tensor in it changed and
nothing else."""

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.tokenization_utils_base import BatchEncoding

from megaprec.precision.nested import map_tensors, tensors

ONE = torch.ones(2)
TWO = torch.full((3,), 2.0)
Named = namedtuple("Named", "left right")


class Strange(Named):
    """A named tuple whose constructor takes something else."""

    def __new__(cls, both: Any) -> "Strange":
        return super().__new__(cls, both, both)


@dataclass
class Plain:
    x: Any
    note: str = "n"
    made: Any = field(init=False, default=None)
    given: InitVar[int] = 3

    def __post_init__(self, given: int) -> None:
        self.made = given


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    n: int = 5


class Extra(dict[str, Any]):
    """A dict with an attribute and a constructor of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def _default() -> Any:
    made: Any = defaultdict(list)
    made["a"] = ONE
    return made


def _extra() -> Extra:
    made = Extra("name")
    made["a"] = ONE
    return made


KINDS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: ONE,
    "dict": lambda: {"a": ONE, "b": [TWO, 3]},
    "OrderedDict": lambda: OrderedDict([("b", ONE), ("a", TWO)]),
    "defaultdict": _default,
    "dict with an attribute": _extra,
    "UserDict": lambda: UserDict(a=ONE),
    "MappingProxyType": lambda: MappingProxyType({"a": ONE, "b": 2}),
    "list": lambda: [ONE, None, (TWO,)],
    "deque": lambda: deque([ONE, 2], maxlen=4),
    "tuple": lambda: (ONE, (), "text"),
    "named tuple": lambda: Named(ONE, TWO),
    "named tuple of another constructor": lambda: Strange(ONE),
    "result of torch.max": lambda: torch.max(torch.eye(3), 0),
    "packed sequence": lambda: nn.utils.rnn.pack_sequence([TWO, ONE]),
    "dataclass": lambda: Plain(ONE),
    "dataclass with slots, frozen": lambda: Frozen([ONE]),
    "ModelOutput": lambda: CausalLMOutputWithPast(loss=ONE, logits=TWO, hidden_states=(ONE, TWO)),
    "BatchEncoding": lambda: BatchEncoding({"input_ids": ONE}),
    "all at once": lambda: {
        "a": [Plain((Frozen(Named(ONE, {"x": TWO})),))],
        "o": BaseModelOutput(last_hidden_state=ONE),
    },
}


def contents(value: Any) -> Iterator[Any]:
    """All that a value is made of, read by other ways than those of the code: its type, then its
    parts."""
    yield type(value)
    if isinstance(value, Tensor):
        yield value.tolist()
    elif hasattr(value, "items"):
        for key, item in value.items():
            yield key
            yield from contents(item)
        yield {k: v for k, v in getattr(value, "__dict__", {}).items() if isinstance(v, str | int)}
    elif isinstance(value, tuple | list | deque):
        for item in value:
            yield from contents(item)
        yield getattr(value, "maxlen", None)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield name
            yield from contents(getattr(value, name, None))
    else:
        yield value


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_comes_back_as_its_own_kind_with_every_tensor_changed(kind: str) -> None:
    value = KINDS[kind]()
    before = list(contents(value))
    doubled = map_tensors(value, lambda t: t * 2)
    assert list(contents(value)) == before  # what was given is not written to
    assert list(contents(map_tensors(doubled, lambda t: t // 2))) == before
    assert [t.tolist() for t in tensors(doubled)] == [(t * 2).tolist() for t in tensors(value)]
    assert list(tensors(value))


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_of_which_nothing_changes_is_handed_back_itself(kind: str) -> None:
    value = KINDS[kind]()
    assert map_tensors(value, lambda t: t) is value


def test_a_model_output_has_the_changed_tensors_as_attributes_too() -> None:
    output = map_tensors(CausalLMOutputWithPast(logits=ONE), lambda t: t.half())
    assert output.logits.dtype == output["logits"].dtype == output[0].dtype == torch.float16


def test_a_packed_sequence_can_still_be_unpacked() -> None:
    packed = map_tensors(
        nn.utils.rnn.pack_sequence([TWO, ONE]), lambda t: t.half() if t.is_floating_point() else t
    )
    assert isinstance(packed, PackedSequence)
    assert nn.utils.rnn.pad_packed_sequence(packed)[0].dtype == torch.float16


@pytest.mark.parametrize(
    "value", ["text", b"bytes", 3, None, range(3), nn.Linear(2, 2), Plain, bytearray(b"x"), {1, 2}]
)
def test_what_is_no_container_is_left_alone(value: Any) -> None:
    assert map_tensors(value, lambda t: t * 2) is value
    assert list(tensors(value)) == []
