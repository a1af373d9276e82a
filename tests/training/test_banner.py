"""The first lines of a run: what its parts have to say is printed."""

from pathlib import Path
from typing import Any

import pytest

from tests.runs import write_run
from tools.config.resolved_run import resolve_run
from tools.training import banner
from tools.training.banner import print_start
from tools.training.corpus import Corpus, open_corpus


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("banner"))


def said_first(
    file: Path, keys: list[str], capsys: pytest.CaptureFixture[str], **given: Any
) -> str:
    config = resolve_run(file, keys)
    corpus: Corpus = open_corpus(config)
    capsys.readouterr()
    usual = {"resumed": None, "steps_done": 0, "refused_kernels": {}}
    print_start(config, corpus, "cpu", **{**usual, **given})
    return capsys.readouterr().out


def test_a_run_says_which_weights_are_in_fp8_and_why_others_are_not(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["fp8.first_layers=1", "fp8.kind=mx", "precision.compute=bf16"]
    said = said_first(file, keys, capsys)
    assert "fp8        mx, e4m3: products of 0 of 8 weights\n" in said
    assert "layers.0.mlp.down.weight: in bf16, for fp8.first_layers = 1\n" in said
    assert "fp8" not in said_first(file, ["precision.compute=bf16"], capsys)


# a function whose result is printed, the key that asks for it, and what its line begins with
PARTS = [
    ("deletion_lines", [], ""),
    ("_describe_stages", ["parallel.pipeline=2"], "stages     "),
    ("resume_lines", [], ""),
]


@pytest.mark.parametrize(("name", "keys", "begin"), PARTS)
def test_what_a_part_has_to_say_is_printed(
    name: str,
    keys: list[str],
    begin: str,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = "a line" if begin else ["a line", "and another"]
    monkeypatch.setattr(banner, name, lambda *given: lines)
    resumed = {"resumed": file.parent / "run", "steps_done": 3} if name == "resume_lines" else {}
    said = said_first(file, keys, capsys, **resumed).splitlines()
    for line in [lines] if begin else lines:
        assert f"{begin}{line}" in said
