"""A measured machine takes the place of the table: what the file says is what the plan assumes."""

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.errors import UserError
from megaprec.parsing import MOST_SETTINGS
from megaprec.resources import cores
from tests.planning import cpu_backtest
from tests.planning.cpu_backtest import BATCH, MIDDLE, measure
from tests.refusals import raises
from tools.analysis.calibration.measure import fastest, products
from tools.analysis.calibration.record import (
    VERSION,
    AttentionRow,
    Calibration,
    CollectiveRow,
    LayerRow,
    LossRow,
    ProductRow,
    differences,
    machine_name,
    read_calibration,
)
from tools.analysis.calibration.speeds import (
    UNKNOWN_CPU,
    _products_of,
    _run_of_layer,
    calibrated,
    speed_between,
)
from tools.analysis.planning.memory import MemoryModel
from tools.analysis.planning.search import plan_run
from tools.cli import main
from tools.config.run_file import RunConfig, load_run

SPEED = 2e10  # FLOP/s of each product
LAYER = 1e-3
RUN = (
    'model.family="llama"',
    "model.layers=4",
    "model.hidden=256",
    "model.heads=4",
    "model.ffn=704",
    "model.vocab=4096",
    "train.steps=10",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.seq_length=256",
    "train.threads=1",
)


def product_row(tokens: int, inputs: int, outputs: int, **changed: Any) -> ProductRow:
    """Return the times of a product at `SPEED`."""
    seconds = 2 * tokens * inputs * outputs / SPEED
    row = ProductRow(
        dtype="fp32",
        threads=1,
        tokens=tokens,
        inputs=inputs,
        outputs=outputs,
        forward=seconds,
        input=seconds,
        weight=seconds,
    )
    return row.model_copy(update=changed)


def calibration_of(**changed: Any) -> Calibration:
    """Return the measurements of a machine whose products all have one speed."""
    flops = 2 * 2 * 512**2 * 8 * 64 / 2
    attention = AttentionRow(
        dtype="fp32",
        threads=1,
        tokens=512,
        heads=8,
        head_dim=64,
        forward=flops / SPEED,
        backward=2.5 * flops / SPEED,
    )
    narrow = LayerRow(
        dtype="fp32",
        threads=1,
        tokens=16,
        hidden=16,
        heads=2,
        ffn=32,
        forward=LAYER,
        backward=2 * LAYER,
    )
    # twice as long as its products would be without anything between them
    wide = narrow.model_copy(update={"tokens": 512, "hidden": 512, "heads": 8, "ffn": 1376})
    wide = wide.model_copy(update={"forward": 0.5, "backward": 1.0})
    loss = LossRow(dtype="fp32", threads=1, tokens=100, vocab=1000, forward=1.0, backward=1.0)
    link = [
        CollectiveRow(kind="all-gather", ranks=2, bytes=1000, seconds=1e-4),
        CollectiveRow(kind="all-gather", ranks=2, bytes=1_001_000, seconds=1.1e-3),
    ]
    values = {
        "version": VERSION,
        "device": "cpu",
        "machine": machine_name("cpu"),
        "cores": cores(),
        "ranks": cores(),
        "process": 4 * 10**8,
        "torch": torch.__version__,
        "date": "2025-01-01",
        "products": (product_row(256, 256, 1024), product_row(1024, 1024, 1024)),
        "attention": (attention,),
        "layers": (narrow, wide),
        "loss": (loss,),
        "collectives": tuple(link),
    }
    return Calibration(**{**values, **changed})


def config_of(*keys: str) -> RunConfig:
    """Return the run, with other keys."""
    return load_run(None, [*RUN, *keys]).on_device("cpu")


def write(folder: Path, calibration: Calibration) -> Path:
    """Write a file as `megaprec calibrate` does."""
    file = folder / "calibration.toml"
    file.write_text("\n".join(calibration.lines()) + "\n")
    return file


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    calibration = calibration_of(machine='A "machine" \\ with marks')
    assert read_calibration(write(tmp_path, calibration)) == calibration


NO_TIME = dict.fromkeys(("forward", "input", "weight"), 1e-12)


@pytest.mark.parametrize(
    "row",
    [
        {"products": (product_row(1, 1, 1, weight=1e6),)},
        {"products": (product_row(1 << 15, 1 << 15, 1 << 15, **NO_TIME),)},
        {"collectives": (CollectiveRow(kind="all-gather", ranks=2, bytes=1, seconds=1e6),)},
        {"collectives": (CollectiveRow(kind="all-gather", ranks=2, bytes=1 << 53, seconds=1e-12),)},
    ],
)
def test_sizes_and_times_that_do_not_belong_together_are_refused(
    row: dict[str, Any], tmp_path: Path
) -> None:
    with raises("planning.calibration_form", problem=re.compile("the speed of no device")):
        read_calibration(write(tmp_path, calibration_of(**row)))


def test_a_collective_of_one_size_has_a_bandwidth() -> None:
    link = CollectiveRow(kind="all-gather", ranks=2, bytes=10**9, seconds=1.0)
    assumed = calibrated(config_of(), calibration_of(collectives=(link,)), UNKNOWN_CPU).assumed
    assert assumed.fast == pytest.approx(1.0)


def test_speeds_are_those_that_were_measured() -> None:
    found = calibrated(config_of(), calibration_of(), UNKNOWN_CPU)
    assumed = found.assumed
    assert not found.missing
    assert assumed.tflops * assumed.efficiency == pytest.approx(SPEED / 1e12)
    assert assumed.attention == pytest.approx(1.0)
    assert assumed.layer == pytest.approx(LAYER)
    assert assumed.logit == pytest.approx(2 / 100_000)
    # the first thousand bytes are latency
    assert assumed.fast == pytest.approx(1.0)
    assert assumed.hop == pytest.approx(1e-4)


def test_attention_has_the_speed_of_its_length_and_a_layer_that_of_the_layers() -> None:
    (short,) = calibration_of().attention
    # four times the work in twice the time
    times = {"forward": 2 * short.forward, "backward": 2 * short.backward}
    long = short.model_copy(update={"tokens": 1024, **times})
    calibration = calibration_of(attention=(short, long))
    found = calibrated(config_of(), calibration, UNKNOWN_CPU).assumed
    of_long = calibrated(config_of("train.seq_length=1024"), calibration, UNKNOWN_CPU).assumed
    assert of_long.attention == pytest.approx(2 * found.attention)
    # the measured layers have 512 tokens in both
    assert of_long.bandwidth == pytest.approx(found.bandwidth)


def test_launches_of_a_measured_layer_are_those_that_were_measured() -> None:
    known = replace(UNKNOWN_CPU, launch=1.0)
    assumed = calibrated(config_of(), calibration_of(), known).assumed
    assert assumed.layer == pytest.approx(LAYER)
    assert assumed.launch == 0.0
    of_gpu = replace(known, device="cuda", layer=2.0)
    assumed = calibrated(config_of(), calibration_of(), of_gpu).assumed
    assert assumed.layer == 2.0
    assert assumed.launch == pytest.approx(LAYER)


def test_measured_layers_are_not_compiled_on_any_device() -> None:
    (narrow, _) = calibration_of().layers
    for device in ("cpu", "cuda"):
        assert _run_of_layer(narrow, device).compile_mode(device) == "off"


def test_a_speed_between_two_shapes_lies_between_theirs() -> None:
    fast = product_row(1024, 1024, 1024)
    slow = product_row(64, 64, 64, forward=1.0, input=1.0, weight=1.0)
    between = speed_between([fast, slow], 256, 256, 256)
    assert slow.flops / slow.seconds < between < fast.flops / fast.seconds


def test_what_was_not_measured_is_named_and_stays_of_the_table() -> None:
    in_bf16 = config_of('precision.compute="bf16"')
    found = calibrated(in_bf16, calibration_of(collectives=()), UNKNOWN_CPU)
    assert {"products in bf16", "collectives"} <= {*found.missing}
    assert replace(found.assumed, crowd=1.0) == UNKNOWN_CPU


def test_twice_as_many_ranks_as_cores_share_them() -> None:
    """While one stage waits, the ranks of the other have its core, so a bubble costs no core."""
    config = config_of("parallel.pipeline=2", "parallel.data=2")
    two_cores = calibration_of(cores=2)
    four_cores = calibration_of(cores=4)
    memory = MemoryModel("cpu")
    seconds = list[float]()
    for calibration in (two_cores, four_cores):
        assumed = calibrated(config, calibration, UNKNOWN_CPU).assumed
        prediction = plan_run(config, memory, assumed).prediction
        assert prediction is not None
        seconds.append(prediction.seconds)
    of_two, of_four = seconds
    # with a core for each rank the bubble is waited for; without, other work fills it
    assert of_four < of_two < 2 * of_four


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("version = 0\n", "planning.calibration_version"),
        ("no table", "planning.calibration_form"),
        (f"version = {VERSION}\nmore = 1\n", "planning.calibration_form"),
        ("a = " + "[" * 5000, "planning.calibration_form"),
        ("a" + ".a" * 5000 + " = 1", "planning.calibration_form"),
        ("a = " + "9" * 5000, "planning.calibration_form"),
        ("#" * (MOST_SETTINGS + 1), "planning.calibration_form"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, code: str) -> None:
    file = tmp_path / "calibration.toml"
    file.write_text(text)
    with raises(code, path=file):
        read_calibration(file)


@pytest.mark.parametrize("place", ["/dev/zero", "fifo"])
def test_a_calibration_that_never_ends_is_refused(tmp_path: Path, place: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    with raises("planning.calibration_form"):
        read_calibration(tmp_path / place)


@pytest.mark.parametrize("wrong", ["1e3", "0", str(2**63), str(2**64), "9" * 60])
def test_a_count_that_no_machine_has_is_refused_by_its_place(tmp_path: Path, wrong: str) -> None:
    file = write(tmp_path, calibration_of())
    file.write_text(re.sub(r"\btokens = \d+", f"tokens = {wrong}", file.read_text(), count=1))
    with raises("planning.calibration_form", path=file):
        read_calibration(file)


@pytest.mark.parametrize("wrong", ["inf", "nan", "1e-320", "1e308", "true", '"1"', "0", "-1.0"])
@pytest.mark.parametrize("kind", ["products", "attention", "layers", "loss", "collectives"])
def test_a_time_that_nothing_took_is_refused_by_its_place(
    tmp_path: Path, kind: str, wrong: str
) -> None:
    file = write(tmp_path, calibration_of())
    before, behind = file.read_text().split(f"{kind} = [\n")
    row, end = behind.split("\n", 1)
    name = "seconds" if kind == "collectives" else "forward"
    damaged = re.sub(rf"\b{name} = [^,}}]*", f"{name} = {wrong}", row)
    file.write_text(f"{before}{kind} = [\n{damaged}\n{end}")
    with raises(
        "planning.calibration_form", path=file, problem=re.compile(rf"^{kind}.0.{name} = ")
    ):
        read_calibration(file)


@pytest.mark.parametrize("key", ["version", "cores", "ranks", "process"])
@pytest.mark.parametrize("wrong", ["true", '"1"', "1.0"])
def test_a_count_of_another_kind_is_refused(tmp_path: Path, key: str, wrong: str) -> None:
    file = write(tmp_path, calibration_of())
    damaged = re.sub(rf"^{key} = .*$", f"{key} = {wrong}", file.read_text(), flags=re.MULTILINE)
    file.write_text(damaged)
    with pytest.raises(UserError):
        read_calibration(file)


def test_another_machine_is_named() -> None:
    assert not [*differences(calibration_of(), "cpu")]
    other = calibration_of(torch="1.0", machine="other", cores=cores() + 1)
    assert len([*differences(other, "cpu")]) == 3


def test_a_plan_takes_the_file_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, calibration_of())
    config = config_of()
    config.save_resolved(tmp_path)
    (run_file,) = tmp_path.glob("run.toml")
    assert main(["plan", str(run_file), "--calibrated", str(file)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"speeds are those of {file}, measured on 2025-01-01" in shown
    assert "only products and messages are timed" not in shown


def test_the_file_of_a_cpu_is_refused_for_a_gpu(tmp_path: Path) -> None:
    file = write(tmp_path, calibration_of())
    config_of().save_resolved(tmp_path)
    (run_file,) = tmp_path.glob("run.toml")
    arguments = ["plan", str(run_file), "--calibrated", str(file), "--gpu", "H100"]
    assert main(arguments) == 2


def test_products_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.analysis.calibration.measure.CPU_SHAPES", ((8, 16, 32),))
    monkeypatch.setattr("tools.analysis.calibration.measure.TRY_SECONDS", 0.0)
    (row,) = products("cpu", torch.float32, 1)
    assert (row.tokens, row.inputs, row.outputs, row.dtype) == (8, 16, 32, "fp32")
    assert row.flops == 3 * 2 * 8 * 16 * 32


def test_a_step_that_leaves_threads_idle_is_no_faster_for_them() -> None:
    def step() -> None:
        time.sleep(0.01)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert fastest(step, torch.device("cpu")) >= 0.01
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_process_has_the_memory_of_the_plan_with_the_gaps_of_its_heap() -> None:
    keys = f"{MIDDLE} {BATCH} train.seq_length=256"
    _, measured = measure(keys, steps=1, priority=0)
    planned = plan_run(cpu_backtest.config_of(keys), MemoryModel("cpu"), None)
    fullest = planned.ranks[planned.fullest]
    needed = planned.total - fullest.save  # the benchmark saves nothing
    assert needed == pytest.approx(measured, rel=0.05)
    assert fullest.gaps > 0.05 * needed  # without them it would not be


MAMBA = "model.mamba={heads=8, head_dim=32, state_dim=32, groups=2}"
EXPERTS = ("model.experts=4", "model.experts_per_token=2")
OF_KINDS: dict[str, tuple[str, ...]] = {
    "llama": ('model.family="llama"', "model.ffn=704"),
    "dense first": ('model.family="mixtral"', "model.dense_layers=[0]", "model.dense_ffn=512"),
    "hybrid": ('model.family="nemotron_h"', 'model.hybrid_pattern="M*E-"', MAMBA),
    "shared": ('model.family="mixtral"', "model.shared_experts=96"),
}


@pytest.mark.parametrize("name", OF_KINDS)
def test_products_of_a_run_are_those_of_its_layers_own_kinds(name: str) -> None:
    """Their FLOPs are those of all weights but the router's, which few rows multiply."""
    keys = [*RUN, "model.ffn=96", *OF_KINDS[name]]
    if name != "llama":
        keys += EXPERTS
    config = load_run(None, keys)
    model = config.sized_model
    tokens = config.train.micro_batch * config.train.seq_length
    counted = sum(2 * rows * ins * outs * n for rows, ins, outs, n in _products_of(config))
    without_weights = model.over_layers(lambda kind: kind.attention_flops(config.train.seq_length))
    routers = len(model.expert_layers) * 2 * model.hidden * model.experts
    of_weights = model.flops_per_token(config.train.seq_length) - without_weights - routers
    assert counted == pytest.approx(tokens * of_weights)
