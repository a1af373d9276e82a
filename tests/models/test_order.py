"""On NCCL a communicator runs its operations in order: what a step waits for must not lie behind
what it does not need.

The operations of an engine are recorded in the order of their calls, in a world of which only rank
0 is there. Waiting for one means waiting for all that were begun before it in the same group.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.optim.grad_sync import ParamGatherer
from megaprec.optim.model_buffers import bucket_elements
from models.decoder import token_count
from models.decoder.stages import Stage
from models.engine import passes
from parallel.mesh import make_mesh
from tests.layouts import Run, batches, make_engine, share_of
from tests.models.test_parity import MODELS
from tools.config.tables.settings import Parallel

FOUR = {**MODELS["llama"], "layers": 4}
BASE = Run(FOUR, "bf16", steps=3, options={"overlap": True, "bucket": 300})


@dataclass
class Recorder:
    """Operations that were begun, by group, and how many of the earliest of a group were waited for
    until then."""

    begun: list[tuple[str, str]] = field(default_factory=list)  # group and operation
    over: dict[str, int] = field(default_factory=dict)  # by group: operations that are complete
    said: list[str] = field(default_factory=list)

    def begin(self, group: str, name: str) -> Callable[[], None]:
        self.begun.append((group, name))
        self.said.append(f"begin {name}")
        number = sum(g == group for g, _ in self.begun)

        def wait() -> None:
            self.over[group] = max(self.over.get(group, 0), number)

        return wait

    def pending(self, name: str) -> int:
        """The operations of this name that nothing has waited for."""
        seen = dict[str, int]()
        left = 0
        for group, operation in self.begun:
            seen[group] = seen.get(group, 0) + 1
            left += operation == name and seen[group] > self.over.get(group, 0)
        return left


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder()

    def recording(
        name: str, result: Callable[[Axis, Tensor], Any]
    ) -> Callable[[Axis, Tensor], Callable[[], Any]]:
        def start(self: Axis, tensor: Tensor) -> Callable[[], Any]:
            if self.group is None:
                return lambda: result(self, tensor)
            wait = made.begin(str(dist.get_process_group_ranks(self.group)), name)
            return lambda: (wait(), result(self, tensor))[1]

        return start

    # The other rank is not there: what it would say is what this one says.
    monkeypatch.setattr(Axis, "max_", lambda self, tensor: tensor)
    repeated = lambda axis, tensor: torch.cat([tensor] * axis.size)  # noqa: E731
    monkeypatch.setattr(Axis, "start_gather", recording("gather", repeated))
    monkeypatch.setattr(
        Axis, "start_sum_", recording("sum", lambda axis, tensor: tensor.mul_(axis.size))
    )
    monkeypatch.setattr(
        Axis, "start_gather_", recording("gather weights", lambda axis, tensor: tensor)
    )
    monkeypatch.setattr(
        Axis, "start_scatter_sum_", recording("reduce gradients", lambda axis, tensor: tensor)
    )
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        yield made
    finally:
        dist.destroy_process_group()


def pending_at_layers(recorder: Recorder, run: Run) -> list[int]:
    """Gathers of weights that nothing had waited for when the first forward pass of a step came to
    each layer."""
    mesh = make_mesh(dp=2)
    engine = make_engine(mesh, run)
    found: list[int] = []
    for block in engine.stages[0].layers.values():  # type: ignore[union-attr]
        block.register_forward_pre_hook(
            lambda module, args: found.append(recorder.pending("gather weights"))
        )
    for number, batch in enumerate(batches(run)):
        found.clear()
        engine.step(share_of(mesh, batch), run.lr, number)
    return found[: FOUR["layers"]]


@pytest.mark.parametrize("masked", [False, True])
def test_weights_of_later_layers_are_under_way_while_a_layer_computes(
    recorder: Recorder, masked: bool
) -> None:
    pending = pending_at_layers(recorder, replace(BASE, masked=masked))
    assert pending == sorted(pending, reverse=True) and len(set(pending)) == FOUR["layers"], pending
    assert pending[-1] > 0, "the head's weights are not under way during the last layer"


def counted_at_once(patch: pytest.MonkeyPatch) -> None:
    inner = token_count.count_tokens
    patch.setattr(
        passes, "count_tokens", lambda **args: (made := inner(**args), made.await_sum())[0]
    )


def head_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stage, "read_late", lambda self: {})


def all_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParamGatherer, "finish_update", ParamGatherer.wait)


@pytest.mark.parametrize("plant", [counted_at_once, head_first, all_at_once])
def test_a_wait_that_comes_too_early_is_found(
    recorder: Recorder, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert set(pending_at_layers(recorder, BASE)) == {0}


def test_gradients_of_later_layers_travel_while_earlier_ones_are_computed(
    recorder: Recorder,
) -> None:
    """Each bucket's reduction is begun before the backward pass of the layer before its own."""
    engine = make_engine(make_mesh(dp=2), replace(BASE, steps=1))
    for n, block in engine.stages[0].layers.items():  # type: ignore[union-attr]
        block.register_full_backward_pre_hook(
            lambda module, grad, n=n: recorder.said.append(f"backward {n}")
        )
    engine.accumulate(share_of(make_mesh(dp=2), batches(BASE)[0]), 0)
    last = {
        n: len(recorder.said) - recorder.said[::-1].index(f"backward {n}")
        for n in map(str, range(FOUR["layers"]))
    }
    begun = [sum(one == "begin reduce gradients" for one in recorder.said[: last[n]]) for n in last]
    assert begun == sorted(begun, reverse=True) and begun[0] > begun[-1] > 0, begun


def test_a_bucket_grows_with_the_replicas() -> None:
    assert [bucket_elements(0, dp) for dp in (1, 40, 64, 2048)] == [40e6, 40e6, 64e6, 2048e6]
    assert bucket_elements(300, 2048) == 300


def test_communication_overlaps_by_default_where_it_has_its_own_processors() -> None:
    assert Parallel(data=2).overlaps("cuda") and not Parallel(data=2).overlaps("cpu")
    assert not Parallel(data=1).overlaps("cuda")
    assert Parallel(data=2, overlap=True).overlaps("cpu") and not Parallel(
        data=2, overlap=False
    ).overlaps("cuda")
