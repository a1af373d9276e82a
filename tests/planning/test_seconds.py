"""The predicted step: its kinds add up, and faster devices are never slower."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.config import ModelConfig
from models.estimate.gpus import GPUS, gpu_named
from models.presets import preset
from tools.analysis.planning.bottleneck import shares
from tools.analysis.planning.measured import read_measured
from tools.analysis.planning.memory import MemoryModel
from tools.analysis.planning.reached import LINKS, assumptions_of
from tools.analysis.planning.search import neighbors, plan_run
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.seconds.attention import causal_share
from tools.analysis.planning.seconds.links import axis_links, link_of, machines_of_token
from tools.analysis.planning.speed import Prediction, passes_of, predict
from tools.config.run_file import RunConfig, load_run

MODEL = (
    "model.layers=8",
    "model.hidden=512",
    "model.heads=8",
    "model.ffn=1024",
    "model.vocab=4096",
    "train.steps=10",
    "train.global_batch=32",
    "train.micro_batch=1",
    "train.seq_length=512",
    "precision.compute=bf16",
)
LAYOUTS: dict[str, Sequence[str]] = {
    "dense": (
        'model.family="llama"',
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.data=2",
    ),
    "interleaved": (
        'model.family="llama"',
        "parallel.pipeline=4",
        'parallel.schedule="interleaved"',
    ),
    "experts": (
        'model.family="mixtral"',
        "model.experts=8",
        "parallel.data=4",
        "parallel.expert=4",
        'parallel.recompute="full"',
    ),
    "context": ('model.family="llama"', "parallel.context=2", "parallel.data=2", "parallel.zero=2"),
    "shared weights": ('model.family="llama"', "parallel.data=8", "parallel.zero=3"),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def config(request: pytest.FixtureRequest) -> RunConfig:
    return load_run(None, [*MODEL, *LAYOUTS[request.param]]).on_device("cuda")


@pytest.fixture(scope="module")
def predict_with(config: RunConfig) -> Callable[[Assumptions], Prediction]:
    """Predicts the run with any assumptions; its bytes are counted once."""
    passes = passes_of(config)
    ranks = MemoryModel("cuda").of(config, passes)
    return lambda assumed: predict(config, passes, ranks, assumed)


def h100(config: RunConfig) -> Assumptions:
    gpu = gpu_named("H100")
    assert gpu
    assumed = assumptions_of(gpu, config.plan)
    assert assumed
    return assumed


def predicted(config: RunConfig, assumed: Assumptions) -> Prediction:
    planned = plan_run(config, MemoryModel("cuda"), assumed)
    assert planned.prediction
    return planned.prediction


@pytest.mark.cases(1, sample=1)
def test_kinds_of_time_add_up_to_the_step(
    config: RunConfig, predict_with: Callable[[Assumptions], Prediction]
) -> None:
    step = predict_with(h100(config))
    in_passes = step.compute + step.attention + step.elementwise + step.fixed + step.tp
    whole = in_passes / (1 - step.idle) + step.exposed + step.update
    assert step.seconds == pytest.approx(whole, rel=1e-9)
    assert sum(shares(step).values()) == pytest.approx(1)
    assert min(step.compute, step.attention, step.elementwise, step.fixed, step.update) > 0
    assert 0 <= step.exposed <= step.dp


@pytest.mark.parametrize(
    "faster",
    ["tflops", "efficiency", "fast", "slow", "bandwidth", "attention", "experts", "hidden"],
)
def test_no_speed_makes_a_step_slower(
    config: RunConfig, predict_with: Callable[[Assumptions], Prediction], faster: str
) -> None:
    """Nor does a shorter time that is fixed."""
    assumed = h100(config)
    step = predict_with(assumed).seconds
    quick = replace(assumed, **{faster: getattr(assumed, faster) * 1.3})
    assert predict_with(quick).seconds <= step * (1 + 1e-9)


def test_a_factor_multiplies_all_times_and_no_byte(
    config: RunConfig, predict_with: Callable[[Assumptions], Prediction]
) -> None:
    assumed = h100(config)
    step = predict_with(assumed)
    twice = predict_with(replace(assumed, factor=2.0))
    assert twice.seconds == pytest.approx(2 * step.seconds)
    assert twice.compute == pytest.approx(2 * step.compute)
    assert twice.traffic == step.traffic


@pytest.mark.slow
def test_fp8_takes_its_own_peak() -> None:
    keys = [
        *MODEL,
        *LAYOUTS["dense"],
        "model.hidden=4096",
        "model.ffn=16384",
        "train.micro_batch=4",
    ]
    wide = load_run(None, keys)
    narrow = load_run(None, [*keys, 'fp8.kind="delayed"', "fp8.pad=true"])
    of_wide = predicted(wide, h100(wide))
    of_narrow = predicted(narrow, h100(narrow))
    assert 0.45 < of_narrow.compute / of_wide.compute < 0.75
    assert of_narrow.elementwise > of_wide.elementwise, "casts"
    gpu = gpu_named("A100")
    assert gpu and not gpu.fp8
    a100 = assumptions_of(gpu, narrow.plan)
    assert a100
    assert predicted(narrow, a100).compute == pytest.approx(predicted(wide, a100).compute, rel=0.01)


def test_what_is_not_compiled_moves_more_bytes() -> None:
    keys = [*MODEL, *LAYOUTS["dense"]]
    eager = load_run(None, [*keys, 'train.compile="off"'])
    compiled = load_run(None, keys)
    of_eager = predicted(eager, h100(eager))
    assert of_eager.elementwise > 1.5 * predicted(compiled, h100(compiled)).elementwise


def test_scores_that_are_computed_are_those_of_a_causal_window() -> None:
    for window, sequence in ((0, 512), (512, 512), (128, 512)):
        config = load_run(None, [*MODEL, 'model.family="llama"', f"model.window={window}"])
        width = window or sequence
        seen = sum(min(query, width) for query in range(1, sequence + 1))
        share = causal_share(config.model, sequence)
        assert share == pytest.approx(seen / (width * sequence), rel=0.01), (window, sequence)


def test_ranks_of_a_machine_share_its_cards() -> None:
    """A ring over all ranks of machines uses all cards; one over every eighth rank uses one."""
    assumed = Assumptions(1000, 0.5, 450, 50, 8)
    assert link_of(1, 8, assumed).bandwidth == 450e9
    assert link_of(1, 64, assumed).bandwidth == 400e9
    assert link_of(4, 64, assumed).bandwidth == 100e9
    assert link_of(8, 64, assumed).bandwidth == 50e9


def test_a_row_that_goes_once_to_a_machine_sends_less_beyond_it() -> None:
    """Of two experts of two machines three in four are of a machine of their own."""
    base = [*MODEL, 'model.family="mixtral"', "model.experts=16", "model.experts_per_token=2"]

    def seconds_of_byte(expert: int, rows_once: bool) -> float:
        """Return the time of a byte without that of links within a machine."""
        keys = [*base, f"parallel.expert={expert}", f"parallel.data={expert}"]
        config = load_run(None, [*keys, "train.global_batch=64"]).on_device("cuda")
        assumed = replace(h100(config), fast=1e9, slow=50, rows_once=rows_once)
        return 1 / axis_links(config, assumed)["experts"].bandwidth

    every = seconds_of_byte(16, rows_once=False)
    assert seconds_of_byte(16, rows_once=True) == pytest.approx(0.75 * every, rel=1e-3)
    assert seconds_of_byte(8, rows_once=True) == seconds_of_byte(8, rows_once=False)


def mean_machines(
    machines: int, groups: int, groups_per_token: int, experts: int, experts_per_token: int
) -> float:
    """Return the mean number of machines of a token's experts, drawn 4,000 times; experts are cut
    over machines in a row, as evenly as possible."""
    random = np.random.default_rng(0)
    parts = np.array_split(np.arange(experts), machines)
    machine_of_expert = np.repeat(np.arange(machines), [len(part) for part in parts])
    visited: list[int] = []
    for _ in range(4000):
        chosen = random.choice(groups, groups_per_token, replace=False)
        eligible = np.arange(experts).reshape(groups, -1)[chosen].flatten()
        drawn = random.choice(eligible, experts_per_token, replace=False)
        visited.append(len({*machine_of_expert[drawn]}))
    return float(np.mean(visited))


def routed(groups: int, groups_per_token: int, experts_per_token: int) -> ModelConfig:
    """Return a model whose router takes so many of its groups and experts for a token."""
    model = preset("deepseek-v3")
    of_router = {"groups": groups, "groups_per_token": groups_per_token}
    router = model.router.model_copy(update=of_router)
    return model.model_copy(update={"router": router, "experts_per_token": experts_per_token})


@pytest.mark.parametrize("machines", [2, 4, 8, 16])
@pytest.mark.parametrize(("groups", "groups_per_token"), [(1, 1), (8, 4), (8, 3)])
def test_a_token_goes_to_as_many_machines_as_with_experts_drawn_from_its_groups(
    machines: int, groups: int, groups_per_token: int
) -> None:
    drawn = mean_machines(machines, groups, groups_per_token, experts=256, experts_per_token=8)
    model = routed(groups, groups_per_token, experts_per_token=8)
    assert machines_of_token(model, machines) == pytest.approx(drawn, rel=0.05)


@pytest.mark.parametrize("machines", [2, 3, 5, 6, 7])
@pytest.mark.parametrize(("groups", "groups_per_token"), [(4, 1), (4, 2), (6, 1), (6, 4)])
@pytest.mark.parametrize("experts_per_token", [2, 6])
def test_groups_that_machines_do_not_share_evenly_are_near_those_drawn(
    machines: int, groups: int, groups_per_token: int, experts_per_token: int
) -> None:
    """Within two fifths, and never less than one machine."""
    drawn = mean_machines(machines, groups, groups_per_token, 240, experts_per_token)
    model = routed(groups, groups_per_token, experts_per_token)
    estimated = machines_of_token(model, machines)
    assert 1 <= estimated <= min(machines, experts_per_token)
    assert estimated == pytest.approx(drawn, rel=0.4)


def test_collectives_reach_a_part_of_what_the_data_sheet_says_of_links() -> None:
    config = load_run(None, [*MODEL, 'model.family="llama"']).on_device("cuda")
    gpu = gpu_named("H100")
    assert gpu
    assert h100(config).fast == pytest.approx(LINKS * gpu.link)
    assert h100(config).slow == pytest.approx(LINKS * gpu.card)
    assert 0.5 < LINKS < 1


def test_data_sheets_are_of_the_order_that_they_have() -> None:
    """FP8 is twice as fast as bf16, TF32 half as fast; memory and links are those of a GPU."""
    for gpu in GPUS:
        if gpu.fp8:
            assert gpu.fp8 == pytest.approx(2 * gpu.half, rel=0.02), gpu.name
        assert gpu.tf32 == pytest.approx(gpu.half / 2, rel=0.03), gpu.name
        assert 300 <= gpu.bandwidth <= 8000, gpu.name
        assert gpu.link <= 900 and gpu.domain in (8, 72), gpu.name


def test_neighbors_are_runs_that_differ_in_one_thing(config: RunConfig) -> None:
    found = [*neighbors(config)]
    assert found
    for other in found:
        assert other.world_size == config.world_size
        assert other.tokens_per_step == config.tokens_per_step
        parallel_differs = other.parallel != config.parallel
        assert parallel_differs != (other.train != config.train)


def test_neighbors_of_replicas_have_every_other_stage_of_zero() -> None:
    for stage in (1, 2, 3):
        keys = [*MODEL, 'model.family="llama"', "parallel.data=8", f"parallel.zero={stage}"]
        config = load_run(None, keys)
        others = [other.parallel for other in neighbors(config)]
        found = {other.zero_stage for other in others}
        assert found == {1, 2, 3}, "the run's own: with another micro-batch"
        kept = {other.zero_keep for other in others}
        assert kept == ({0, 2} if stage == 3 else {0})


def test_zero_3_that_keeps_layers_gathers_less_and_waits_less() -> None:
    keys = [*MODEL, *LAYOUTS["shared weights"]]
    config = load_run(None, keys).on_device("cuda")
    steps = [
        predicted(config.with_value("parallel.zero_keep", keep, "a test"), h100(config))
        for keep in (0, 4, 8)
    ]
    sent = [step.traffic.dp for step in steps]
    assert sent[0] > sent[1] > sent[2]
    assert steps[0].exposed > steps[1].exposed > steps[2].exposed


def test_the_factor_of_a_run_is_that_of_its_median_step(tmp_path: Path) -> None:
    config = load_run(None, [*MODEL, *LAYOUTS["dense"]])
    config.save_resolved(tmp_path)
    record = '{"step": %d, "outcome": "applied", "loss": 1, "grad_norm": 1, "loss_scale": 1'
    seconds = [60, 20, 9, *[2.0] * 5, 7]  # compilation, and an interruption
    lines = [record % step + f', "seconds": {time}}}\n' for step, time in enumerate(seconds, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    run = read_measured(tmp_path)
    assert (run.seconds, run.steps) == (2.0, 6)
    assert run.config.parallel == config.parallel


MAMBA = "model.mamba={heads=16, head_dim=64, state_dim=64, groups=4}"
TENSOR = ("parallel.tensor=2", "parallel.sequence=true")


def predicted_pattern(pattern: str, *keys: str) -> Prediction:
    """Predict the step of layers of one branch."""
    model = [*MODEL, 'model.family="nemotron_h"', f'model.hybrid_pattern="{pattern}"']
    mamba = [MAMBA] if "M" in pattern else []
    layers = f"model.layers={len(pattern)}"
    config = load_run(None, [*model, *mamba, layers, *TENSOR, *keys]).on_device("cuda")
    return predicted(config, h100(config))


def test_a_layer_of_one_branch_sends_half_as_much_over_tensor_as_one_of_two() -> None:
    config = load_run(None, [*MODEL, 'model.family="llama"', *TENSOR, "model.layers=2"])
    of_two_branches = predicted(config.on_device("cuda"), h100(config))
    of_one_branch = predicted_pattern("*-*-")
    assert of_one_branch.traffic.tp == of_two_branches.traffic.tp
    assert of_one_branch.fixed == pytest.approx(of_two_branches.fixed)


@pytest.mark.slow
def test_a_recurrence_takes_time_and_not_that_of_the_square_of_its_tokens() -> None:
    """Of its own products: with sequences four times as long, and as many tokens."""
    mixers = predicted_pattern("M-M-")
    longer = predicted_pattern("M-M-", "train.seq_length=2048", "train.global_batch=8")
    assert mixers.attention > 0
    assert longer.attention == pytest.approx(mixers.attention, rel=0.01)


def test_a_head_whose_logits_are_not_aligned_takes_three_times_as_long() -> None:
    """50,257 words are odd; 50,264 are a multiple of eight."""

    def products(vocab: int, *others: str) -> float:
        # with so many tokens that no product waits for its weight
        size = (f"model.vocab={vocab}", "model.layers=1", "train.micro_batch=32")
        keys = [*MODEL, 'model.family="llama"', *size, *others]
        config = load_run(None, keys).on_device("cuda")
        assumed = h100(config)
        aligned = predicted(config, replace(assumed, misaligned=1.0)).compute
        return predicted(config, assumed).compute - aligned

    head_flops = 3 * 2 * 512 * 50257 * 512 * 32
    assumed = h100(load_run(None, [*MODEL, 'model.family="llama"']))
    seconds = head_flops / (assumed.tflops * 1e12 * assumed.efficiency)
    assert products(50264) == 0.0
    assert products(50257, 'precision.compute="fp32"') == 0.0  # nobody has measured it
    assert products(50257) == pytest.approx(2 * seconds, rel=0.01)


def test_small_layers_that_are_not_compiled_take_as_long_as_their_launches() -> None:
    keys = [*MODEL, 'model.family="llama"', "model.layers=2"]
    compiled = load_run(None, keys).on_device("cuda")
    eager = load_run(None, [*keys, 'train.compile="off"']).on_device("cuda")
    assumed = h100(compiled)
    # of 32 micro-batches, two layers and three passes
    launches = 32 * 2 * 3 * assumed.launch
    assert predicted(compiled, assumed).seconds < launches / 2
    assert predicted(eager, assumed).seconds == pytest.approx(launches, rel=0.1)


def test_rows_of_experts_are_waited_for_whatever_else_runs_beside_products() -> None:
    config = load_run(None, [*MODEL, *LAYOUTS["experts"]]).on_device("cuda")
    assumed = h100(config)
    sent = predicted(config, assumed).tp
    assert sent > 0
    assert predicted(config, replace(assumed, hidden=1.0)).tp == pytest.approx(sent)


def test_launches_of_a_whole_backward_pass_run_beside_both_of_its_halves() -> None:
    """A half that is launched faster than it is computed leaves time for launches of the other."""
    # with so many tokens that reading weights takes next to no time
    size = ("model.layers=1", "train.micro_batch=32", 'train.compile="off"')
    config = load_run(None, [*MODEL, 'model.family="llama"', *size]).on_device("cuda")
    # products take next to none either: what is between them is all that weights do not need
    assumed = replace(h100(config), efficiency=1e6, layer=0.0, hop=0.0, launch=0.0)
    of_pass = predicted(config, assumed).elementwise / 3
    launched = predicted(config, replace(assumed, launch=2 / 3 * of_pass))
    assert launched.fixed == pytest.approx(0.0, abs=1e-3 * launched.seconds)
