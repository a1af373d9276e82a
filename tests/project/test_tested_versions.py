"""Versions of packages that nobody has tried are named: in a run, by `doctor`, and where their
results are compared."""

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megaprec import tested_versions
from megaprec.tested_versions import PYTHONS, untested
from tests.doctor.places import place
from tests.other_systems import write_folder
from tests.project.test_readme import ROOT
from tests.refusals import raises
from tests.runs import train, write_run
from tools.convert import probe, verify
from tools.verify.doctor.machine import facts

RULES = [
    "torch<2.15,>=2.11",
    "sentencepiece!=0.2.1,<0.3,>=0.2",
    'transformers<6,>=5.20; extra == "hf"',
    'pytest<10,>=9; extra == "test"',
    'megatron-core<0.17; extra == "oracles"',
]
TORCH = "torch 2.15.1 is not of the versions that megaprec is tested with: <2.15,>=2.11"


def install(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Have these packages be installed, with dashes for underscores, and no others."""

    def version(name: str) -> str | None:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(tested_versions, "requires", lambda name: RULES)
    monkeypatch.setattr(tested_versions, "version", version)


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        ("torch", ("2.10.0", "2.15.1", "2.11.0a0+nv25.11", "3.0")),
        ("sentencepiece", ("0.1.99", "0.2.1", "0.3.0")),
        ("transformers", ("4.57.0", "5.12.0", "6.0.0rc1")),
    ],
)
def test_other_versions_are_named(
    name: str, versions: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in versions:
        install(monkeypatch, **{name: one})
        (said,) = untested()
        assert said.startswith(
            f"{name} {one} is not of the versions that megaprec is tested with: "
        )
        assert not [*untested("another")] and [*untested(name)] == [said]


@pytest.mark.parametrize(
    ("there", "said"), [("my-build_7", "torch my-build_7"), (None, "torch of no version")]
)
def test_a_version_that_is_none_is_not_tested(
    there: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, torch=there)
    assert [one.partition(" is not of")[0] for one in untested()] == [said]


def test_tested_versions_and_tools_of_developers_are_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(
        monkeypatch, torch="2.13.0+cpu", sentencepiece="0.2.3", transformers="5.23.0", pytest="7.0"
    )
    assert not [*untested()]
    install(monkeypatch, torch="2.12.1", megatron_core="0.20")
    assert not [*untested()]


def test_a_checkout_that_is_not_installed_knows_no_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(tested_versions, "requires", requires)
    assert not [*untested()]


def test_what_is_installed_here_is_tested() -> None:
    assert not [*untested()]


@pytest.mark.parametrize("running", ["3.10.9", "3.14.0", "3.15.0a1", "3.13.1+"])
def test_a_python_that_was_not_tried_is_named(
    running: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.python_version", lambda: running)
    install(monkeypatch)
    assert [*untested()] == [
        f"python {running} is not of the versions that megaprec is tested with: {PYTHONS}"
    ]
    assert not [*untested("torch")]


def test_the_readme_names_the_pythons_that_were_tried() -> None:
    listed = re.findall(r"Python (3\.\d+), (3\.\d+) or (3\.\d+)", (ROOT / "README.md").read_text())
    tried = re.findall(r"^\| Python (3\.\d+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(listed) == 2 and "or later" not in (ROOT / "README.md").read_text()
    for versions in (*listed, tuple(dict.fromkeys(tried))):
        assert versions == tuple(f"3.{n}" for n in range(20) if f"3.{n}" in PYTHONS)


def test_a_run_names_them_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    install(monkeypatch, torch="2.15.1")
    assert train(file, "train.steps=1") == 0
    assert capsys.readouterr().err.splitlines().count(f"note: {TORCH}") == 1


def test_doctor_asks_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.15.1")
    assert facts(place(tmp_path))["untested"] == [TORCH]


@pytest.mark.slow
def test_a_comparison_that_fails_names_the_version_of_the_other_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, transformers="5.12.0")
    monkeypatch.setattr(probe, "difference", lambda config: 1.0)
    with raises(
        "convert.probe_logits",
        logit_difference="1.0",
        if_untested=re.compile(r"transformers 5\.12\.0 is not of the versions"),
    ):
        probe.check_config({"model_type": "gpt2"}, "config.json")


def test_logits_that_differ_name_it_where_it_has_computed_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    one, other = (
        write_folder(tmp_path / name, "llama", hidden_size=size)
        for name, size in (("a", 24), ("b", 24))
    )
    weights = load_file(other / "model.safetensors")
    save_file({name: value * 2 for name, value in weights.items()}, other / "model.safetensors")
    untested = re.compile(r"; transformers 5\.12\.0 is not of the versions")
    install(monkeypatch, transformers="5.12.0")
    with raises("convert.verify_differs", if_untested=untested):
        verify.compare_logits(one, other)
    monkeypatch.setattr(verify, "_is_run_by_transformers", lambda path: False)
    with raises("convert.verify_differs") as refused:
        verify.compare_logits(one, other)
    assert "transformers" not in str(refused.value)


def test_transformers_that_cannot_be_imported_is_not_called_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def difference(config: str) -> float:
        raise ImportError("tokenizers>=0.23.1 is required,\n but found tokenizers==0.22.2.")

    install(monkeypatch, transformers="5.12.0")
    monkeypatch.setattr(probe, "difference", difference)
    said = (
        "cannot be imported (tokenizers>=0.23.1 is required, but found tokenizers==0.22.2.); "
        "transformers 5.12.0 is not"
    )
    assert said in probe.check_config({"model_type": "gpt2"}, "config.json")
