"""The bytes that ZeRO-3 is foretold to send are those that a step sends."""

from collections.abc import Sequence

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.precision.plan import plan
from models.engine.passes import Share
from models.parameter_counts import num_parameters
from tests.models.test_state import LENGTH, Case, engine_of
from tests.ranks import run_ranks
from tests.whole_weights import counted_whole_weights
from tools.analysis.planning.seconds.traffic import replica_bytes
from tools.config.run_file import load_run

MICROBATCHES = 4
RANKS = 2
MODEL = {
    "family": "llama",
    "layers": 6,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 96,
    "vocab": 128,
    "max_positions": LENGTH,
}
CASES = [
    Case({**MODEL, "tied": tied}, plan("bf16"), zero=3, keep=keep)
    for keep in (0, 2, 9)
    for tied in (False, True)
]


def gathered_by_case(mesh: DeviceMesh, cases: Sequence[Case]) -> list[int]:
    """The bytes of weights that are gathered in the second step of each case."""
    return [gathered_in(mesh, case) for case in cases]


def gathered_in(mesh: DeviceMesh, case: Case) -> int:
    ids = torch.arange(MICROBATCHES * LENGTH).view(MICROBATCHES, LENGTH) % 100
    with counted_whole_weights() as counted:
        engine = engine_of(mesh, case, pp=1)
        engine.step(Share(ids, ids), 1e-3, 0)
        before = counted.total
        engine.step(Share(ids, ids), 1e-3, 1)
    return counted.total - before


def foretold(case: Case) -> float:
    """The bytes of weights that a rank sends: of a run without gradients."""
    keys = [
        *(f"model.{key}={str(value).lower()}" for key, value in case.model.items()),
        f"train.seq_length={LENGTH}",
        f"train.global_batch={MICROBATCHES * RANKS}",
        "train.micro_batch=1",
        "train.steps=10",
        "data.vocab_size=128",
        "precision.compute=bf16",
        f"parallel.data={RANKS}",
        "parallel.zero=3",
        f"parallel.zero_keep={case.keep}",
    ]
    config = load_run(None, keys)
    weights = 2 * num_parameters(config.sized_model)
    return replica_bytes(config, gradients=0.0, weights=weights)


@pytest.mark.slow
def test_a_step_gathers_as_many_bytes_of_weights_as_is_foretold() -> None:
    """Each rank sends its own part of what it gathers to the others."""
    for found in run_ranks(gathered_by_case, {"dp": RANKS}, cases=CASES):
        for case, gathered in zip(CASES, found, strict=True):
            sent = gathered * (1 - 1 / RANKS)
            assert sent == pytest.approx(foretold(case), rel=0.01), case
