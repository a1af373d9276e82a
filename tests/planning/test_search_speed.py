"""A search among thousands of ranks takes seconds of a core, not minutes.

Its time is that of a few counted things: the stages whose passes are run, and the pipelines that
are simulated. What these take is a matter of the machine, and no law.
"""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from models.estimate import memory
from models.feed_forward.moe import Expert
from parallel.pipeline import simulation
from tools.analysis.planning import memory as memory_of_plan
from tools.analysis.planning import remedies, speed
from tools.analysis.planning.device import DeviceTarget, target_of
from tools.analysis.planning.memory import MemoryModel
from tools.analysis.planning.reached import assumptions_of
from tools.analysis.planning.search import LayoutSearch, Planned, plan_run, search
from tools.cli import main
from tools.commands.plan import NOTHING_FITS
from tools.config.run_file import RunConfig, load_run

LLAMA_405B = (
    'model.family="llama"',
    "model.layers=126",
    "model.hidden=16384",
    "model.heads=128",
    "model.kv_heads=8",
    "model.ffn=53248",
    "model.vocab=128256",
    "precision.compute=bf16",
    "train.steps=10",
    "train.global_batch=2048",
    "train.micro_batch=1",
    "train.seq_length=8192",
    "parallel.tensor=8",
    "parallel.pipeline=16",
    "parallel.data=128",
)


SMALL = (
    'model.family="llama"',
    "model.layers=4",
    "model.hidden=1024",
    "model.heads=16",
    "model.ffn=4096",
    "model.vocab=8192",
    "precision.compute=bf16",
    "train.steps=10",
    "train.global_batch=16",
    "train.micro_batch=4",
    "train.seq_length=1024",
    "parallel.data=2",
)


@pytest.fixture
def state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small model ZeRO-3 saves less than NCCL keeps for the group that shares its weights."""
    monkeypatch.setattr(memory_of_plan, "communicator_bytes", lambda *_: 0)


DEEPSEEK_V3 = (
    'model.preset="deepseek-v3"',
    "precision.compute=bf16",
    "train.steps=10",
    "train.global_batch=15360",
    "train.micro_batch=1",
    "train.seq_length=4096",
    "parallel.pipeline=16",
    "parallel.data=128",
    "parallel.expert=64",
    "parallel.expert_tensor=1",
)


PLAIN_DEEPSEEK_V3 = """
[model]
preset = "deepseek-v3"
[precision]
compute = "bf16"
[train]
steps = 10
global_batch = 15360
micro_batch = 1
seq_length = 4096
"""


def test_a_run_on_one_rank_that_cannot_fit_is_not_built_before_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 256 experts of 58 layers would be, for the run and for each change that may mend it."""
    built = list[str]()
    make_expert = Expert.__init__

    def note_expert(self: Expert, *args: Any, **keys: Any) -> None:
        built.append(args[2])
        make_expert(self, *args, **keys)

    def find_one_too_large(*_: object) -> LayoutSearch:
        return LayoutSearch([], slower=0, too_large=1, smallest=1)

    monkeypatch.setattr(Expert, "__init__", note_expert)
    monkeypatch.setattr("tools.commands.plan.search", find_one_too_large)
    run_file = tmp_path / "run.toml"
    run_file.write_text(PLAIN_DEEPSEEK_V3)
    assert main(["plan", str(run_file), "--ranks", "2048", "--gpu", "H800"]) == NOTHING_FITS
    assert not built


def test_changes_that_cannot_be_enough_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    on_one_rank = [key for key in DEEPSEEK_V3 if not key.startswith("parallel.")]
    config = load_run(None, on_one_rank).on_device("cuda")

    def refuse(*_: object) -> None:
        raise AssertionError("a layout was planned whose state alone does not fit")

    monkeypatch.setattr(remedies, "plan_run", refuse)
    assert remedies.cheapest_remedy(config, target_of(config, "H100"), None) is None


FP8_WEIGHTS = ('fp8.kind="current"', "fp8.parameters=true")


@pytest.mark.parametrize(
    ("keys", "gigabytes"),
    [((), 1.63), ((), 1.77), ((), 2.19), (FP8_WEIGHTS, 2.22), (FP8_WEIGHTS, 2.62)],
)
@pytest.mark.parametrize("timed", [True, False])
def test_the_cheapest_change_is_that_of_trying_all_and_few_are_tried(
    keys: tuple[str, ...], gigabytes: float, timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight changes; without a known speed the one of fewest keys. No bound is above what it
    bounds."""
    config = load_run(None, (*SMALL, *keys)).on_device("cuda")
    sheet = target_of(config, "H100").gpu
    assert sheet
    target = DeviceTarget("cuda", "a small GPU", int(gigabytes * 10**9), sheet)
    assumed = assumptions_of(sheet, config.plan) if timed else None
    planned = list[RunConfig]()

    def note_planned(changed: RunConfig, *others: Any) -> Planned:
        planned.append(changed)
        return plan_run(changed, *others)

    monkeypatch.setattr(remedies, "plan_run", note_planned)
    found = remedies.cheapest_remedy(config, target, assumed)

    memory_model = MemoryModel("cuda")
    fitting: list[tuple[float, int]] = []
    for changes, changed in remedies._changed_runs(config, target):
        tried = plan_run(changed, memory_model, assumed)
        if tried.prediction and assumed:
            bound = speed.least_seconds_of_schedule(changed, speed.passes_of(changed), assumed)
            assert bound <= tried.prediction.seconds
        if target.verdict(tried.total) == "fits":
            seconds = tried.prediction.seconds if tried.prediction else 0.0
            fitting.append((seconds, len(changes)))
    assert fitting
    assert found
    assert remedies._seconds(found) == min(fitting)
    assert len(planned) < len(remedies.CHANGES)


@pytest.mark.usefixtures("state_alone")
def test_a_run_that_fits_with_zero_3_alone_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the changes that leave state on the device."""
    on_device = [keys for keys in remedies.CHANGES if "optimizer.offload" not in keys]
    monkeypatch.setattr(remedies, "CHANGES", on_device)
    config = load_run(None, [*SMALL, "train.micro_batch=1", "train.global_batch=2"])
    config = config.on_device("cuda")
    memory_model = MemoryModel("cuda")
    sizes: dict[bool, int] = {}  # of the smallest, by whether the weights are shared
    gpu = DeviceTarget("cuda", "a GPU")
    for changes, changed in remedies._changed_runs(config, gpu):
        shares_weights = changes.get("parallel.zero") == 3
        total = plan_run(changed, memory_model, None).total
        sizes[shares_weights] = min(total, sizes.get(shares_weights, total))
    between = (sizes[True] + sizes[False]) // 2
    target = DeviceTarget("cuda", "a small GPU", int(between / 0.95), None)
    found = remedies.cheapest_remedy(config, target, None)
    assert found and found.keys["parallel.zero"] == 3


@pytest.mark.usefixtures("state_alone")
def test_a_layout_that_fits_with_a_higher_stage_of_zero_alone_is_found() -> None:
    """Also if others fit without it, which are slower."""
    batch = ("train.micro_batch=1", "train.global_batch=8", "parallel.data=8")
    config = load_run(None, [*SMALL, *batch]).on_device("cuda")
    sheet = target_of(config, "H100").gpu
    assert sheet
    assumed = assumptions_of(sheet, config.plan)
    assert assumed
    sizes: list[int] = []
    for stage in (1, 3):
        run = config.with_value("parallel.zero", stage, "a test")
        sizes.append(plan_run(run, MemoryModel("cuda"), None).total)
    memory = int(sum(sizes) / 2 / 0.95)
    target = DeviceTarget("cuda", "a small GPU", memory, sheet)
    found = search(config, 8, target, assumed, lambda *_: None)
    of_replicas = [one.config.parallel for one in found.layouts if one.config.parallel.data == 8]
    assert any(one.zero_stage == 3 and one.recompute == "none" for one in of_replicas)


class CountedSearch(NamedTuple):
    """A search of a run's layouts, and what it had to do."""

    target: DeviceTarget
    found: LayoutSearch
    run_stages: int
    simulated_pipelines: int


def search_and_count(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], ranks: int
) -> CountedSearch:
    """Search the layouts of a run on H100s, and count the dear parts of the search."""
    counts = Counter[str]()
    run_stage = memory._measure
    simulate = simulation.simulate

    def count_stage(*args: Any, **keys: Any) -> Any:
        counts["stages"] += 1
        return run_stage(*args, **keys)

    def count_pipeline(*args: Any, **keys: Any) -> Any:
        counts["pipelines"] += 1
        return simulate(*args, **keys)

    monkeypatch.setattr(memory, "_measure", count_stage)
    # for the times of a layout, and for the messages that its ranks hold
    monkeypatch.setattr(speed, "simulate", count_pipeline)
    monkeypatch.setattr(simulation, "simulate", count_pipeline)
    config = load_run(None, overrides).on_device("cuda")
    target = target_of(config, "H100")
    assert target.gpu
    assumed = assumptions_of(target.gpu, config.plan)
    assert assumed
    found = search(config, ranks, target, assumed, lambda *_: None)
    return CountedSearch(target, found, counts["stages"], counts["pipelines"])


@pytest.mark.slow
def test_few_stages_are_run_to_search_the_layouts_of_deepseek_v3_on_2048_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = search_and_count(monkeypatch, DEEPSEEK_V3, 2048)
    assert len(search.found.layouts) == 10
    assert search.found.unseen == 0
    assert 0 < search.run_stages <= 90
    assert 0 < search.simulated_pipelines <= 120


@pytest.mark.campaign
def test_few_stages_are_run_to_search_the_layouts_of_405_billion_parameters_on_16384_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The published run of Llama 3.1 had an MFU of 38 to 43 % with pipelines of several stages a
    rank, which are among those found."""
    search = search_and_count(monkeypatch, LLAMA_405B, 16384)
    assert 0 < search.run_stages <= 60
    assert 0 < search.simulated_pipelines <= 120
    best = search.found.layouts[0]
    assert best.prediction
    assert search.target.verdict(best.total) == "fits"
    assert best.config.parallel.chunks > 1
