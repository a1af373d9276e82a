"""What a loop of one's own gives to `save` and `load` is used as it is, or refused by name before a
file is made."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megaprec import ParallelAMPOptimizer, UserError, attach_whole, load, load_weights, plan, save
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


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "folder": ({"folder": None}, "folder = None: must be a path"),
    "optimizer": (
        {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
        "optimizer: must be .*, not a SGD",
    ),
    "step as text": ({"step": "3"}, "step = '3': must be"),
    "negative step": ({"step": -1}, "step = -1: must be"),
    "step of truth": ({"step": True}, "step = True: must be"),
    "keep all": ({"keep": -1}, "keep = -1: must be"),
    "keep none": ({"keep": 0}, "keep = 0: must be"),
    "keep as text": ({"keep": "2"}, "keep = '2': must be"),
    "no extra": ({"extra": None}, "extra = None: must be a dict"),
    "a tensor": (
        {"extra": {"a": [torch.ones(2)]}},
        r"extra\['a'\]\[0\] is a Tensor: a checkpoint holds JSON values",
    ),
    "keys of a scheduler": (
        {"extra": {"milestones": {30: 1}}},
        r"extra\['milestones'\] has the key 30, .*into text",
    ),
    "a key of ours": (
        {"extra": {"tensors": 1}},
        "extra has the key 'tensors', which a checkpoint has itself",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_would_not_come_back_as_it_is_is_refused_by_name(which: str, tmp_path: Path) -> None:
    """JSON turns whole numbers as keys, like a scheduler's milestones, into text, and the schedule
    would be lost."""
    change, says = WRONG[which]
    arguments: dict[str, Any] = {
        "folder": tmp_path,
        "step": 1,
        "optimizer": made()[1],
        "extra": {},
    } | change
    with pytest.raises(UserError, match=f"^{says}"):
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
    with pytest.raises(UserError, match=r"^optimizer: must be .*, not a Linear"):
        load(path, wrong)
