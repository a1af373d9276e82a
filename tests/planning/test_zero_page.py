"""The numbers of docs/zero.md are those of `megaprec plan`: python -m tests.planning.test_zero_page
prints them."""

from collections.abc import Iterator

import pytest

from models.estimate.gpus import gpu_named
from tests.project.test_readme import ROOT
from tools.analysis.planning.memory import MemoryModel
from tools.analysis.planning.reached import assumptions_of
from tools.analysis.planning.search import Planned, plan_run
from tools.config.run_file import load_run

RUN = (
    'model.preset="llama-3-8b"',
    "precision.compute=bf16",
    "data.vocab_size=128256",
    "train.steps=10",
    "train.micro_batch=1",
    "train.seq_length=8192",
)
STAGES = {
    "none": ("parallel.zero=false",),
    "ZeRO-1": ("parallel.zero=true",),
    "ZeRO-2": ("parallel.zero=2",),
    "ZeRO-3": ("parallel.zero=3",),
    "ZeRO-3, `zero_keep = 16`": ("parallel.zero=3", "parallel.zero_keep=16"),
    "ZeRO-3, `zero_keep = 32`": ("parallel.zero=3", "parallel.zero_keep=32"),
}
MICROBATCHES = (8, 1)
REPLICAS = 8
GIB = 2**30


def planned(keys: tuple[str, ...], microbatches: int) -> Planned:
    """The run on H100s in one stage of ZeRO."""
    batch = (f"parallel.data={REPLICAS}", f"train.global_batch={REPLICAS * microbatches}")
    config = load_run(None, [*RUN, *batch, *keys]).on_device("cuda")
    gpu = gpu_named("H100")
    assert gpu
    return plan_run(config, MemoryModel("cuda"), assumptions_of(gpu, config.plan))


def rows() -> Iterator[str]:
    """Yield the rows of the page's table."""
    for stage, keys in STAGES.items():
        steps = [planned(keys, microbatches) for microbatches in MICROBATCHES]
        rank = steps[0].ranks[0]
        held = (rank.weights, rank.gradients, rank.masters + rank.moments)
        meanwhile = rank.arriving + rank.gathered
        cells = [f"{number / GIB:.1f}" for number in (*held, meanwhile, rank.total)]
        for step in steps:
            assert step.prediction
            sent = step.prediction.traffic.dp / GIB
            cells.append(f"{sent:.0f} GiB, {step.prediction.seconds:.2f} s")
        yield f"| {stage} | {' | '.join(cells)} |"


@pytest.mark.slow
def test_the_rows_of_the_page_are_those_of_the_plan() -> None:
    page = (ROOT / "docs" / "zero.md").read_text()
    missing = [row for row in rows() if f"\n{row}\n" not in page]
    assert not missing, "docs/zero.md lacks these rows:\n" + "\n".join(missing)


if __name__ == "__main__":
    print("\n".join(rows()))
