"""`python -m tools.bench gpu`, tried on the CPU with small sizes; and its page says what has been
run."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megaprec.errors import Problem
from tests.project.test_readme import ROOT
from tools.bench import __main__ as bench
from tools.bench import gpu
from tools.bench.gpu_page import NOTHING, page
from tools.bench.gpu_peers import torch_native
from tools.bench.llama_layers import Workload

TINY = [
    "--layers",
    "2",
    "--hidden",
    "64",
    "--vocab",
    "128",
    "--tokens",
    "16",
    "--micro-batch",
    "1",
    "--rounds",
    "1",
]
WORK = Workload(2, 64, 4, 2, 224, 128, 16, 1, 2, "cpu")
here = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@here
def test_without_a_gpu_one_line_says_so_and_the_page_stays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench.main(["gpu", "--page", str(tmp_path / "gpu.md")]) == 2
    said = capsys.readouterr()
    assert said.err == f"{Problem.of('bench.no_gpu')}\n" and not said.out
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


def test_megaprec_and_torch_take_steps_of_the_same_work(tmp_path: Path) -> None:
    file = tmp_path / "gpu.md"
    systems = ["megaprec", "torch", "Transformer Engine"]
    assert (
        bench.main(
            [
                "gpu",
                "--device",
                "cpu",
                "--no-tests",
                "--page",
                str(file),
                *TINY,
                "--systems",
                *systems,
            ]
        )
        == 0
    )
    text = file.read_text()
    assert "device no GPU: the CPU, to try the program" in text and NOTHING not in text
    rows = {
        line.split("|")[1].strip(): line.split("|")[2].strip()
        for line in text.splitlines()
        if line[:2] == "| "
    }
    assert all(float(rows[name].replace(",", "")) > 0 for name in systems[:2])
    assert rows["Transformer Engine"].startswith(
        "not measured: transformer_engine is not installed"
    )
    assert "The tests were not run (`--no-tests`)." in text


def test_the_work_is_the_same_to_the_parameter_and_the_first_loss() -> None:
    config = WORK.model
    torch.manual_seed(0)
    step = torch_native(WORK)
    losses = [step() for _ in range(4)]
    first, later = (
        float(loss) for loss in (losses[0], losses[-1]) if isinstance(loss, torch.Tensor)
    )
    assert first == pytest.approx(5.0, abs=0.6) and later < first  # ln 128 = 4.85
    native = gpu.PEERS["torch"].__globals__["Decoder"](
        WORK, [gpu.PEERS["torch"].__globals__["Layer"](WORK) for _ in "12"]
    )
    assert sum(p.numel() for p in native.parameters()) == config.num_parameters


def test_the_committed_page_is_the_programs_own() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert text == page() or (NOTHING not in text and "CUDA " in text), (
        "write it with python -m tools.bench gpu"
    )


def test_a_system_that_fails_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(work: Workload) -> None:
        raise RuntimeError("CUDA out of memory\nmore")

    monkeypatch.setitem(gpu.PEERS, "torch", broken)
    rows = gpu.measure_systems(replace(WORK, layers=1), ["torch"], 1)
    assert rows == {"torch": "RuntimeError: CUDA out of memory"}
    assert "| torch | not measured: RuntimeError: CUDA out of memory |" in page(
        {"device": "x"}, WORK, rows, {}
    )


REPORT = """<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="one"/>
<testcase classname="tests.gpu.test_a" name="two"><skipped message="needs 2 GPUs, and torch sees 1"/></testcase>
<testcase classname="tests.gpu.test_a" name="three"><failure message="assert 1 == 2&#10;more"/></testcase>
</testsuite></testsuites>"""


def test_the_outcome_of_each_test_is_on_the_page_and_a_failure_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = gpu.read_outcomes(REPORT)
    name = "tests/gpu/test_a.py::"
    reason = "skipped: needs 2 GPUs, and torch sees 1"
    assert found == {
        f"{name}one": "passed",
        f"{name}two": reason,
        f"{name}three": "failed: assert 1 == 2",
    }
    monkeypatch.setattr(gpu, "run_tests", lambda: found)
    monkeypatch.setattr(
        gpu,
        "measure_systems",
        lambda *_: {"megaprec": {"tokens_per_s": 1.0, "step_s": 1.0, "tflops": 1.0}},
    )
    assert bench.main(["gpu", "--device", "cpu", "--page", str(tmp_path / "gpu.md")]) == 1
    text = (tmp_path / "gpu.md").read_text()
    assert (
        "Tests: 1 passed, 1 failed, 1 skipped." in text
        and f"- `{name}three` failed: assert 1 == 2" in text
    )
    assert f"failed     {name}three" in capsys.readouterr().out
