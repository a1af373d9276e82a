"""What a loop of one's own gives to `save` and `load` is used as it is, or refused by name before a
file is made."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megaprec import ParallelAMPOptimizer, attach_whole, load, load_weights, plan, save
from megaprec.checkpoint.reader import Store
from tests.refusals import raises


def made() -> tuple[nn.Module, ParallelAMPOptimizer]:
    model = nn.Linear(3, 2)
    attach_whole(model)
    return model, ParallelAMPOptimizer([model], plan("fp32"), lr=0.1)


def test_a_path_may_be_text_and_what_is_saved_beside_the_state_comes_back(tmp_path: Path) -> None:
    model, optimizer = made()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5).state_dict()
    extra = {
        "best": math.inf,
        "names": ["a", "b"],
        "schedule": schedule,
        "nothing": None,
        "done": True,
    }
    path = save(str(tmp_path), 3, optimizer, extra)
    other, resumed = made()
    index = load(str(path), resumed)
    assert {key: index[key] for key in extra} == extra
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    other, resumed = made()
    load_weights(Store(path), resumed)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


WRONG: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "folder": ({"folder": None}, "path_kind", {"name": "folder", "path": None}),
    "optimizer": (
        {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
        "optimizer_kind",
        {"kind": "SGD"},
    ),
    "step as text": ({"step": "3"}, "step_value", {"step": "3"}),
    "negative step": ({"step": -1}, "step_value", {"step": -1}),
    "step of truth": ({"step": True}, "step_value", {"step": True}),
    "keep all": ({"keep": -1}, "keep_value", {"keep": -1}),
    "keep none": ({"keep": 0}, "keep_value", {"keep": 0}),
    "keep as text": ({"keep": "2"}, "keep_value", {"keep": "2"}),
    "keep every": ({"keep_every": -2}, "keep_every_value", {"keep_every": -2}),
    "no extra": ({"extra": None}, "extra_kind", {"extra": None}),
    "a tensor": (
        {"extra": {"a": [torch.ones(2)]}},
        "extra_value_kind",
        {"name": "extra['a'][0]", "kind": "Tensor"},
    ),
    "keys of a scheduler": (
        {"extra": {"milestones": {30: 1}}},
        "extra_key_kind",
        {"name": "extra['milestones']", "key": 30},
    ),
    "a key of ours": ({"extra": {"tensors": 1}}, "extra_key_taken", {"key": "tensors"}),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_would_not_come_back_as_it_is_is_refused_by_name(which: str, tmp_path: Path) -> None:
    """JSON turns whole numbers as keys, like a scheduler's milestones, into text, and the schedule
    would be lost."""
    change, code, fields = WRONG[which]
    arguments: dict[str, Any] = {
        "folder": tmp_path,
        "step": 1,
        "optimizer": made()[1],
        "extra": {},
    } | change
    with raises(f"checkpoint.{code}", **fields):
        save(**arguments)
    assert not list(tmp_path.iterdir())


def test_what_is_no_checkpoint_or_no_source_of_weights_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = made()
    path = save(tmp_path, 1, optimizer, {})
    none: list[Any] = [path, model.state_dict(), None]
    for weights in none:
        with raises("checkpoint.weights_only_from_store"):
            load_weights(weights, optimizer)
    wrong: Any = model
    with raises("checkpoint.optimizer_kind", kind="Linear"):
        load(path, wrong)
