"""`python -m tools.bench gpu`, tried on the CPU with small sizes; and its page says what has been
run."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.errors import Problem
from models.parameter_counts import num_parameters
from tests.project.test_readme import ROOT
from tests.refusals import raises
from tools.bench import __main__ as bench
from tools.bench import gpu
from tools.bench.gpu import LAWS, Measurement, measurements, read_records, to_take
from tools.bench.gpu_page import with_results
from tools.bench.gpu_peers import PEERS, Decoder, Layer
from tools.bench.llama_layers import Workload
from tools.config.run_file import load_run

WORK = Workload(2, 64, 4, 2, 224, 128, 16, 1, 2, "cpu")
PAGE = (ROOT / "docs" / "gpu.md").read_text()
here = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@here
def test_without_a_gpu_one_line_says_so_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = ["--page", str(tmp_path / "gpu.md"), "--records", str(tmp_path / "runs" / "gpu.jsonl")]
    for command in (["gpu", *files], ["probe"], ["peer", "torch"], ["train", "--device", "cuda"]):
        assert bench.main(command) == 2
        output = capsys.readouterr()
        assert output.err == f"{Problem.of('bench.no_gpu')}\n" and not output.out
    assert list(tmp_path.iterdir()) == []


def test_make_gpu_says_so_before_it_sets_anything_up(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["make", "gpu"], cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 2 and not done.stdout
    assert (
        done.stderr.splitlines()[0] == "no GPU here: nothing was run, and docs/gpu.md is as it was"
    )


def test_make_gpu_with_the_packages_that_are_there_installs_nothing() -> None:
    printed = subprocess.run(
        ["make", "--dry-run", "gpu", "GPU_PYTHON=python3"], cwd=ROOT, capture_output=True, text=True
    )
    assert "python3 -m tools.bench gpu" in printed.stdout
    assert "pip" not in printed.stdout


def test_the_work_of_all_systems_is_the_same_to_the_parameter() -> None:
    native = Decoder(WORK, [Layer(WORK) for _ in range(WORK.layers)])
    assert sum(p.numel() for p in native.parameters()) == num_parameters(WORK.model)
    config = load_run(None, ["train.steps=1", *WORK.keys])
    assert num_parameters(config.model) == num_parameters(WORK.model)
    assert config.tokens_per_step == 2 * 16
    args = bench.parser().parse_args(["peer", "torch", *WORK.options])
    assert Workload.of(args) == WORK


def test_a_peer_learns_from_the_loss_of_chance_on() -> None:
    torch.manual_seed(0)
    step: Any = PEERS["torch"](WORK)
    losses = [float(step()) for _ in range(4)]
    assert losses[0] == pytest.approx(5.0, abs=0.6)  # ln 128 = 4.85
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_measurement_has_a_command_that_is_understood(device: str) -> None:
    parser = bench.parser()
    planned = measurements(device)
    assert len({measurement.name for measurement in planned}) == len(planned)
    for measurement in planned:
        assert measurement.seconds < 540, "a call takes less than ten minutes"
        if measurement.arguments:
            args = parser.parse_args(measurement.arguments)
            if measurement.arguments[0] == "train":
                load_run(None, ["train.steps=8", *args.keys])


DEVICE = gpu.describe_machine("cpu")["device"]


def run_gpu(folder: Path, *options: str) -> int:
    files = ["--page", str(folder / "gpu.md"), "--records", str(folder / "gpu.jsonl")]
    return bench.main(["gpu", "--device", "cpu", *files, *options])


def planned(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """All measurements are these, and each yields its name."""
    plan = [Measurement(name, ("probe",), seconds=1.0) for name in names]
    monkeypatch.setattr(gpu, "measurements", lambda device: plan)
    monkeypatch.setattr(gpu, "take", lambda measurement: iter([{"took": measurement.name}]))


def test_a_call_ends_in_time_says_what_is_left_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(monkeypatch, "first", "second")
    assert run_gpu(tmp_path, "--minutes", "0") == 0
    left = "left       first; second: run it again, for 1 minutes or longer"
    assert left in capsys.readouterr().out
    first = json.dumps({"measurement": "first", "at": "1", "on": DEVICE})
    (tmp_path / "gpu.jsonl").write_text(f'{first}\n{{"measurement": "sec')
    assert run_gpu(tmp_path) == 0
    output = capsys.readouterr().out
    assert 'measuring  second, at most 1 s\n           {"took": "second"}\n' in output
    taken = [record["measurement"] for record in read_records(tmp_path / "gpu.jsonl", DEVICE)]
    assert taken == ["first", "second"]
    assert "second: " in (tmp_path / "gpu.md").read_text()


def test_what_is_named_is_taken_again_and_counts_instead(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    for at, speed in (("1", 1.0), ("2", 2.0)):
        gpu.append(file, {"measurement": "torch", "at": at, "on": DEVICE, "tokens_per_s": speed})
    (record,) = read_records(file, DEVICE)
    assert record["tokens_per_s"] == 2.0
    plan = [Measurement("torch"), Measurement("megaprec")]
    assert to_take(plan, [record], []) == plan[1:]
    assert to_take(plan, [record], ["torch"]) == plan[:1]


def test_a_name_that_no_measurement_has_is_refused_and_those_that_exist_are_named() -> None:
    plan = [Measurement("torch"), Measurement("megaprec")]
    with raises("bench.unknown_measurement", names="torhc", known="torch; megaprec"):
        to_take(plan, [], ["torch", "torhc"])


def test_what_was_measured_on_another_card_is_neither_on_the_page_nor_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, "first")
    other = {"measurement": "first", "at": "1", "on": "1 x another card", "took": "elsewhere"}
    gpu.append(tmp_path / "gpu.jsonl", other)
    assert run_gpu(tmp_path) == 0
    text = (tmp_path / "gpu.md").read_text()
    assert 'first: {"took": "first"}' in text and "elsewhere" not in text


def test_what_was_refused_is_not_tried_again_unasked_and_the_last_line_says_how_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(monkeypatch, "first", "megaprec, block")
    monkeypatch.setattr(gpu, "take", lambda measurement: iter([{"refused": "out of memory"}]))
    assert run_gpu(tmp_path) == 1
    output = capsys.readouterr().out
    assert "           refused: out of memory" in output
    again = 'again      python -m tools.bench gpu --only "megaprec, block"'
    assert output.splitlines()[-1] == again
    monkeypatch.setattr(gpu, "take", lambda measurement: pytest.fail("not asked for"))
    assert run_gpu(tmp_path) == 1


def test_each_file_of_laws_is_a_process_of_its_own_and_a_late_one_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [each.name for each in measurements("cuda") if not each.arguments]
    assert files == sorted(f"tests/gpu/{path.name}" for path in (ROOT / LAWS).glob("test_*.py"))

    def hang(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("pytest", timeout)

    monkeypatch.setattr(gpu, "RECORDS", tmp_path / "gpu.jsonl")
    monkeypatch.setattr(subprocess, "run", hang)
    (record,) = gpu.take(Measurement("tests/gpu/test_kernels.py", seconds=9))
    assert record == {"refused": "the tests were not done after 9 s"}


def test_a_measurement_that_fails_is_a_record_that_says_why() -> None:
    wrong = Measurement("wrong", ("train", "model.layers=no"))
    (record,) = gpu.take(wrong)
    assert "model.layers" in record["refused"]
    late = Measurement("late", ("probe", "--device=cpu"), seconds=0.1)
    (record,) = gpu.take(late)
    assert record["refused"] == "not done after 0 s"


@pytest.mark.campaign
def test_megaprec_and_peers_are_measured_and_the_page_has_them(tmp_path: Path) -> None:
    names = ["machine", "torch", "torchtitan-like", "megaprec, off", "Transformer Engine"]
    assert run_gpu(tmp_path, "--only", *names) == 0
    text = (tmp_path / "gpu.md").read_text()
    assert "device no GPU: the CPU, to try the program" in text
    rows = {}
    for line in text.splitlines():
        if line.startswith(("| torch", "| megaprec")):
            _, name, speed, *_ = line.split("|")
            rows[name.strip()] = float(speed.replace(",", ""))
    assert set(rows) == {"torch", "torchtitan-like", "megaprec, off"} and min(rows.values()) > 0
    assert "transformer_engine is not installed" in text
    probes = [record.get("probe") for record in read_records(tmp_path / "gpu.jsonl", DEVICE)]
    assert {"versions", "ceilings", "products", "attention", "collectives"} <= set(probes)


REPORT = """<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="one"/>
<testcase classname="tests.gpu.test_a" name="two"><skipped message="needs 2 GPUs"/></testcase>
<testcase classname="tests.gpu.test_a" name="three"><failure message="assert 1 == 2&#10;more"/></testcase>
</testsuite></testsuites>"""


def test_the_outcome_of_each_test_is_on_the_page_and_a_failure_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = gpu.read_outcomes(REPORT)
    name = "tests/gpu/test_a.py::"
    assert outcomes == {
        f"{name}one": "passed",
        f"{name}two": "skipped: needs 2 GPUs",
        f"{name}three": "failed: assert 1 == 2",
    }
    records = [{"test": test, "outcome": outcome} for test, outcome in outcomes.items()]
    monkeypatch.setattr(gpu, "measurements", lambda device: [Measurement(gpu.LAWS, seconds=1.0)])
    monkeypatch.setattr(gpu, "take", lambda measurement: iter(records))
    assert run_gpu(tmp_path) == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "Tests: 1 passed, 1 failed, 1 skipped." in text
    assert f"- `{name}three` failed: assert 1 == 2" in text
    assert f"failed     {name}three" in capsys.readouterr().out


def test_what_was_seen_takes_the_place_of_what_was_seen_before_and_of_nothing_else() -> None:
    record = {
        "measurement": "torch",
        "at": "1",
        "tokens_per_s": 1234.0,
        "step_s": 0.5,
        "tflops": 1.0,
    }
    once = with_results(PAGE, {"device": "x"}, [record])
    assert "| torch | 1,234 | 500.0 ms | 1 | not known | not known |" in once
    assert "Nothing on this page has been run on a GPU" not in once
    heads = [line for line in once.splitlines() if line.startswith("#")]
    assert heads == [line for line in PAGE.splitlines() if line.startswith("#")]
    again = with_results(once, {"device": "x"}, [record])
    assert again == once


def test_every_file_of_the_page_is_there() -> None:
    for word in PAGE.replace("|", " ").replace("`", " ").split():
        if word.startswith("tests/") and word.endswith(".py"):
            assert (ROOT / word).is_file(), word
