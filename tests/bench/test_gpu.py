"""`python -m tools.bench gpu`, tried on the CPU with small sizes; and its page says what has been
run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.errors import Problem
from models.parameter_counts import num_parameters
from tests.project.test_readme import ROOT
from tools.bench import __main__ as bench
from tools.bench import gpu, gpu_page, gpu_take, pack
from tools.bench.gpu_page import with_results
from tools.bench.gpu_peers import PEERS, Decoder, Layer
from tools.bench.gpu_plan import LAWS, Measurement, measurements
from tools.bench.gpu_records import append, read_records
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
        assert measurement.seconds <= 300, "a call takes five minutes"
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
    plan = [Measurement(name, ("probe",), seconds=1.0, usual=0.0) for name in names]
    monkeypatch.setattr(gpu, "measurements", lambda device: plan)
    answers(monkeypatch, lambda name: [{"took": name}, {"done": True}])


def answers(
    monkeypatch: pytest.MonkeyPatch, records: Callable[[str], list[dict[str, Any]]]
) -> None:
    """What measurements print."""
    monkeypatch.setattr(gpu, "take", lambda measurement, *_: iter(records(measurement.name)))


def taken(folder: Path) -> list[str]:
    records = read_records(folder / "gpu.jsonl", DEVICE)
    return list(dict.fromkeys(record["measurement"] for record in records))


def test_a_call_ends_in_time_says_what_is_left_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(monkeypatch, "first", "second", "third")
    assert run_gpu(tmp_path, "--minutes", "0") == 0
    assert "left       first; second; third: run it again" in capsys.readouterr().out
    ended = json.dumps({"measurement": "first", "at": "1", "on": DEVICE, "done": True})
    cut = json.dumps({"measurement": "second", "at": "1", "on": DEVICE, "cut": "the call ended"})
    (tmp_path / "gpu.jsonl").write_text(f'{ended}\n{cut}\n{{"measurement": "thi')
    assert run_gpu(tmp_path) == 0
    output = capsys.readouterr().out
    assert "measuring  first" not in output
    assert 'measuring  second, at most 1 s\n           {"took": "second"}\n' in output
    assert taken(tmp_path) == ["first", "call", "second", "third"]
    assert "second: " in (tmp_path / "gpu.md").read_text()


def test_what_is_named_is_taken_again_and_counts_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, "torch", "megaprec")
    for speed in (1.0, 2.0):
        step = {"tokens_per_s": speed, "step_s": 1.0, "tflops": 1.0}
        answers(monkeypatch, lambda name, step=step: [step, {"done": True}])
        assert run_gpu(tmp_path, "--only", "torch") == 0
    assert taken(tmp_path) == ["call", "torch"]
    assert "| torch | 2 |" in (tmp_path / "gpu.md").read_text()


def test_a_name_that_no_measurement_has_is_refused_and_those_that_exist_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(monkeypatch, "torch", "megaprec")
    assert run_gpu(tmp_path, "--only", "torch", "torhc") == 2
    expected = Problem.of("bench.unknown_measurement", names="torhc", known="torch; megaprec")
    assert capsys.readouterr().err == f"{expected}\n"


def test_what_was_measured_on_another_card_is_neither_on_the_page_nor_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, "first")
    other = {"measurement": "first", "at": "1", "on": "1 x another card"}
    append(tmp_path / "gpu.jsonl", {**other, "took": "elsewhere"})
    append(tmp_path / "gpu.jsonl", {**other, "done": True})
    assert run_gpu(tmp_path) == 0
    text = (tmp_path / "gpu.md").read_text()
    assert 'first: {"took": "first"}' in text and "elsewhere" not in text


def test_what_was_refused_is_not_tried_again_unasked_and_the_last_line_says_how_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(monkeypatch, "torch", "megaprec, block")
    answers(monkeypatch, lambda name: [{"refused": "out of memory"}])
    assert run_gpu(tmp_path) == 1
    output = capsys.readouterr().out
    assert "           refused: out of memory" in output
    again = 'again      python -m tools.bench gpu --only "megaprec, block"'
    assert output.splitlines()[-1] == again
    answers(monkeypatch, lambda name: pytest.fail("not asked for"))
    assert run_gpu(tmp_path) == 1


def test_the_first_call_has_what_tells_most_and_every_file_of_laws_is_taken_once() -> None:
    plan = measurements("cuda")
    names = [measurement.name for measurement in plan]
    first = ["machine", f"{LAWS}/test_training.py", f"{LAWS}/test_attention.py"]
    assert names[:6] == [*first, "megaprec, block", "torch", "torchtitan-like"]
    assert sum(measurement.usual for measurement in plan[:6]) <= 240, "four minutes"
    files = [name for name in names if name.startswith(LAWS)]
    assert sorted(files) == sorted(f"{LAWS}/{path.name}" for path in (ROOT / LAWS).glob("test_*"))


# a test of each kind: it ends its process, hangs, fails, is skipped, passes
LAWS_OF_ALL_KINDS = """
import os, time, pytest
pytestmark = pytest.mark.gpu
def test_first(): pass
def test_dies(): os.kill(os.getpid(), 9)
def test_hangs(): time.sleep(10**6)
def test_fails(): assert 1 == 2
@pytest.fixture
def broken(): raise ValueError("no fixture")
def test_errs(broken): pass
@pytest.mark.parametrize("name", ["a b", "c[d]::e"])
def test_named(name): pass
@pytest.mark.skip(reason="needs 2 GPUs")
def test_skipped(): pass
def test_last(): pass
"""
OUTCOMES = {
    "test_first": "passed",
    "test_dies": "failed: SIGKILL ended it",
    "test_hangs": "failed: not done after 10 s",
    "test_fails": "failed: assert 1 == 2",
    "test_errs": "failed: ValueError: no fixture",
    "test_named[a b]": "passed",
    "test_named[c[d]::e]": "passed",
    "test_skipped": "skipped: Skipped: needs 2 GPUs",
    "test_last": "passed",
}


@pytest.fixture
def laws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    """A file of laws of all kinds, which a process tries that knows nothing of this project's."""
    file = tmp_path / "test_kinds.py"
    file.write_text(LAWS_OF_ALL_KINDS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    monkeypatch.setattr(gpu_take, "SILENCE", 10.0)
    monkeypatch.setattr(gpu_take, "is_law", lambda name: True)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Measurement(str(file), seconds=10**6)


@pytest.mark.slow
def test_a_test_that_hangs_or_dies_takes_no_other_with_it(
    laws: Measurement, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("a+b") as log:
        records = list(gpu_take.take(laws, 10**6, log))
    found = {record["test"].partition("::")[2]: record["outcome"] for record in records[:-1]}
    assert found == OUTCOMES
    assert records[-1] == {"done": True}
    (failed,) = (record for record in records if record.get("outcome", "").endswith("1 == 2"))
    assert "def test_fails(): assert 1 == 2" in failed["details"]


@pytest.mark.slow
def test_what_is_left_of_a_file_of_laws_is_tried_by_the_next_call(
    laws: Measurement, tmp_path: Path
) -> None:
    known = [f"test_kinds.py::{name}" for name in [*OUTCOMES][:-2]]
    with (tmp_path / "log").open("a+b") as log:
        cut = list(gpu_take.take(laws, 0.0, log, known))
        records = list(gpu_take.take(laws, 10**6, log, known))
    assert [*cut[0]] == ["cut"]
    names = [record["test"].partition("::")[2] for record in records[:-1]]
    assert names == ["test_skipped", "test_last"]


def test_a_measurement_that_fails_is_a_record_that_says_why(tmp_path: Path) -> None:
    with (tmp_path / "log").open("a+b") as log:
        wrong = Measurement("wrong", ("train", "model.layers=no"))
        (record,) = gpu_take.take(wrong, 10**6, log)
        assert "model.layers" in record["refused"]
        late = Measurement("late", ("probe", "--device=cpu"), seconds=0.1)
        (record,) = gpu_take.take(late, 10**6, log)
        assert record["refused"] == "not done after 0 s"
        (record,) = gpu_take.take(Measurement("late", ("probe", "--device=cpu")), 0.1, log)
        assert record["cut"] == "the call ended after 0 s of it"


# what a card may do to a measurement: the reason of its record
FAULTS = {
    "works": ("print(json.dumps(RECORD))", None),
    "fails": ("raise RuntimeError('CUDA error: an illegal memory access')", "RuntimeError: CUDA"),
    "has no memory": (
        "print(json.dumps(RECORD)); raise MemoryError('CUDA out of memory. Tried to allocate 2')",
        "MemoryError: CUDA out of memory",
    ),
    "hangs": ("print(json.dumps(RECORD), flush=True); time.sleep(10**6)", "not done after 3 s"),
    "dies": ("print('{\"half\": 1', flush=True); os.abort()", "SIGABRT ended it"),
    "says nothing": ("pass", "it printed no record"),
}


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("shift", range(len(FAULTS)))
def test_whatever_a_card_does_at_a_stage_the_others_run_and_the_record_is_whole(
    shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the whole program, with a stand-in for each process: each stage has each fault in one of
    the cases."""
    names = [*FAULTS]
    plan: list[Measurement] = []
    fault_of: dict[str, str] = {}
    for number, each in enumerate(measurements("cuda")):
        fault = names[(number + shift) % len(names)]
        fault_of[each.name] = fault
        plan.append(replace(each, seconds=3.0 if fault == "hangs" else 600.0, usual=0.0))

    def stand_in(measurement: Measurement) -> list[str]:
        step = {"tokens_per_s": 9.0, "step_s": 1.0, "tflops": 1.0, "who": measurement.name}
        program, _ = FAULTS[fault_of[measurement.name]]
        return [sys.executable, "-c", f"import json, os, time; RECORD = {step!r}; {program}"]

    monkeypatch.setattr(gpu, "measurements", lambda device: plan)
    monkeypatch.setattr(gpu_take, "command_of", stand_in)
    monkeypatch.setattr(gpu_take, "is_law", lambda name: False)
    assert run_gpu(tmp_path, "--minutes", "100") == 1
    records = read_records(tmp_path / "gpu.jsonl", DEVICE)
    endings = {record["measurement"]: record for record in records}
    for name, fault in fault_of.items():
        reason = FAULTS[fault][1]
        if reason is None:
            assert endings[name]["done"]
        else:
            assert endings[name]["refused"].startswith(reason)
    measured = {record["who"] for record in records if "who" in record}
    tell = ("works", "has no memory", "hangs")
    assert measured == {name for name, fault in fault_of.items() if fault in tell}
    text = (tmp_path / "gpu.md").read_text()
    assert all(f"| {name} | 9 |" in text for name in measured)
    output = capsys.readouterr().out
    assert "left " not in output and "again      python -m tools.bench gpu --only" in output


def test_a_machine_that_goes_while_the_page_is_written_leaves_the_page_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, "machine")
    run_gpu(tmp_path)
    page = tmp_path / "gpu.md"
    before = page.read_bytes()

    class Gone(BaseException):
        pass

    def go(*_: object) -> None:
        raise Gone

    # the last moment before the new page is in its place
    monkeypatch.setattr(os, "replace", go)
    append(tmp_path / "gpu.jsonl", {"measurement": "late", "at": "9999", "on": DEVICE, "took": 1})
    with pytest.raises(Gone):
        gpu_page.write_page(tmp_path / "gpu.jsonl", page)
    assert page.read_bytes() == before
    monkeypatch.undo()
    gpu_page.write_page(tmp_path / "gpu.jsonl", page)
    assert page.read_bytes() != before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gpu.jsonl", "gpu.log", "gpu.md"]


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


def test_the_outcome_of_each_test_is_on_the_page_and_a_failure_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{LAWS}/test_a.py"
    outcomes = {"one": "passed", "two": "skipped: needs 2 GPUs", "three": "failed: assert 1 == 2"}
    records: list[dict[str, Any]] = [
        {"test": f"{name}::{test}", "outcome": outcome} for test, outcome in outcomes.items()
    ]
    planned(monkeypatch, name)
    answers(monkeypatch, lambda _: [*records, {"done": True}])
    assert run_gpu(tmp_path) == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "Tests: 1 passed, 1 failed, 1 skipped." in text
    assert f"- `{name}::three` failed: assert 1 == 2" in text
    assert f"failed     {name}::three" in capsys.readouterr().out


def test_what_was_seen_takes_the_place_of_what_was_seen_before_and_of_nothing_else() -> None:
    record = {
        "measurement": "torch",
        "at": "1",
        "tokens_per_s": 1234.0,
        "step_s": 0.5,
        "tflops": 1.0,
    }
    kernels = {"kernels": 7, "idle_share": 0.125, "kernel_table": [["a|b", 7, 1.5, 1.0]]}
    profile = {"measurement": "torch", "at": "1", "profile": kernels}
    once = with_results(PAGE, {"device": "x"}, [record, profile])
    assert "| `a/b` | 7 | 1.50 | 100.0% |" in once
    assert "| torch | 1,234 | 500.0 ms | 1 | not known | not known | 12.5% |" in once
    assert "Nothing on this page has been run on a GPU" not in once
    heads = [line for line in once.splitlines() if line.startswith("#")]
    assert heads == [line for line in PAGE.splitlines() if line.startswith("#")]
    again = with_results(once, {"device": "x"}, [record, profile])
    assert again == once


def test_the_commands_for_a_bare_machine_are_those_of_the_calls_and_need_no_more_than_python() -> (
    None
):
    printed = "\n".join(pack.instructions())
    assert printed.count("python3 tools/bench/carried.py --minutes") == 3
    for script in ("carried", "pack"):
        file = ROOT / "tools" / "bench" / f"{script}.py"
        done = subprocess.run(
            [sys.executable, "-I", "-S", file, "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert pack.pinned("pydantic").startswith("pydantic==")
    assert pack.pinned("annotated-types") == "annotated-types"


def test_every_file_of_the_page_is_there() -> None:
    for word in PAGE.replace("|", " ").replace("`", " ").split():
        if word.startswith("tests/") and word.endswith(".py"):
            assert (ROOT / word).is_file(), word
