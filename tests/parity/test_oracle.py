"""`megaprec parity --oracle transformers`: a run trains what other people's code trains, and a fault
that all layouts share shows."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.optim.rules.update_rules import Lion
from models.feed_forward.router import is_correction
from models.logical_shapes import logical_shapes
from tests.families import CASES, config_of
from tests.parity.oracle_runs import (
    DOCUMENTS,
    OPTIMIZER,
    PACKED,
    TRAIN,
    assert_all_is_proven,
    assert_rounding_shows,
    beside_oracle,
    entry_beside_oracle,
    plant_in_batches,
    shift_targets,
    words_of,
)
from tests.refusals import shows
from tools import cli
from tools.config.own_rate import rate_of
from tools.config.run_file import load_run
from tools.config.tables.batch_schedule import BatchSchedule, LengthSchedule
from tools.convert.hf.config import model_type_of
from tools.verify.oracle.limits import STEPS
from tools.verify.oracle.transformers_model import TransformersModel
from tools.verify.parity.noise import Noise
from tools.verify.parity.record import Record
from tools.verify.parity.runs import LayoutLimits, shrunk, with_rates_of

pytest.importorskip("transformers", minversion="5", reason="needs transformers: the extra hf")

ROOT = Path(__file__).parents[2]


@pytest.mark.cases(4, sample=8)
@pytest.mark.parametrize("family", CASES)
def test_every_family_trains_what_transformers_and_torch_train(family: str, tmp_path: Path) -> None:
    entry = entry_beside_oracle(words_of(family), tmp_path)
    assert_all_is_proven(entry)


@pytest.mark.cases(2, sample=6)
@pytest.mark.parametrize("family", PACKED)
def test_documents_groups_other_norms_rates_and_averages_are_those_of_the_oracle(
    family: str, tmp_path: Path
) -> None:
    entry = entry_beside_oracle([*words_of(family), *DOCUMENTS, *OPTIMIZER], tmp_path)
    assert entry["verdict"] == "proven", entry.get("first")


@pytest.mark.parametrize("family", CASES)
def test_made_small_a_model_of_every_family_is_one_that_transformers_has(family: str) -> None:
    config = load_run(None, [*words_of(family), *TRAIN])
    for ranks in (1, 2, 4):
        small = shrunk(config, LayoutLimits(ranks, ranks, ranks), STEPS).model
        assert model_type_of(small) == model_type_of(config.model)


CONFIGS = {family: config_of(case) for family, case in CASES.items()}
CORRECTED = [
    family for family, config in CONFIGS.items() if config.experts and config.router.correction
]


@pytest.mark.parametrize("family", CORRECTED)
def test_the_oracle_counts_each_token_at_each_of_its_experts(family: str) -> None:
    config = CONFIGS[family]
    made = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=made, dtype=torch.float64) / 10
        for name, shape in logical_shapes(config).items()
    }
    model = TransformersModel(config, weights)
    tokens = torch.randint(0, config.vocab, (2, 7), generator=made)
    with model.computing():
        model.logits(tokens, torch.arange(7).expand(2, -1))
    corrections = [name for name in weights if is_correction(name)]
    assert len(model.loads) == len(corrections) > 0
    for counts in model.loads.values():
        assert counts.sum() == tokens.numel() * config.experts_per_token


RULES = {
    "sgd": ["optimizer.name=sgd"],
    "sgd, Nesterov": [
        "optimizer.name=sgd",
        "optimizer.options={momentum = 0.8, nesterov = true}",
    ],
    "lion": ["optimizer.name=lion"],
    "lion, other betas": ["optimizer.name=lion", "optimizer.options={betas = [0.8, 0.95]}"],
}


@pytest.mark.cases(2, sample=4)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_that_the_oracle_has_updates_as_it_does(rule: str, tmp_path: Path) -> None:
    words = [*words_of("qwen3"), *RULES[rule], "optimizer.weight_decay=0.3"]
    assert_all_is_proven(entry_beside_oracle(words, tmp_path))


def test_betas_of_lion_that_are_swapped_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Lion.update_

    def update(self: Lion, *arguments: Any) -> None:
        of_step, of_momentum = self.betas
        right(Lion(betas=(of_momentum, of_step)), *arguments)

    monkeypatch.setattr(Lion, "update_", update)
    entry = entry_beside_oracle([*words_of("llama"), *RULES["lion"]], tmp_path)
    assert entry["verdict"] == "wrong"
    assert entry["quantities"]["gradient"]["verdict"] == "wrong", "of the steps that follow"


CHANGING = {
    "batches": ["train.batch_schedule=[[0, 2], [8, 6], [20, 4]]", "lr.unit=samples"],
    "lengths": ["train.seq_schedule=[[0, 4], [8, 8], [20, 16]]"],
}
CHANGING["both, with documents"] = [*CHANGING["batches"], *CHANGING["lengths"], *DOCUMENTS]


@pytest.mark.cases(2, sample=3)
@pytest.mark.parametrize("name", CHANGING)
def test_batches_and_lengths_that_change_are_those_of_the_oracle(name: str, tmp_path: Path) -> None:
    words = [*words_of("qwen3"), *CHANGING[name], "lr.schedule=wsd", "lr.decay=2"]
    certificate = beside_oracle([*words, "train.micro_batch=1"], tmp_path)
    first, *_ = certificate["layouts"]
    assert_all_is_proven(first)
    parts = [part for part, _ in certificate["not_tried"]]
    assert not [part for part in parts if part.startswith("train.")]


@pytest.mark.parametrize(
    ("schedule", "name"), [(BatchSchedule, "batches"), (LengthSchedule, "lengths")]
)
def test_a_change_that_comes_a_sample_late_shows(
    schedule: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = schedule.at

    def late(self: Any, consumed: int) -> int:
        return right(self, max(0, consumed - 1))

    monkeypatch.setattr(schedule, "at", late)
    words = [*words_of("llama"), *CHANGING[name], "train.micro_batch=1"]
    assert entry_beside_oracle(words, tmp_path)["verdict"] == "wrong"


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_rates_are_those_of_formulas_of_its_own(schedule: str, tmp_path: Path) -> None:
    words = [*words_of("llama"), f"lr.schedule={schedule}", "lr.final=1e-5", "lr.decay=2"]
    assert entry_beside_oracle(words, tmp_path)["verdict"] == "proven"


def test_in_fp32_the_difference_is_that_of_rounding(tmp_path: Path) -> None:
    assert_rounding_shows(words_of("qwen3"), tmp_path)


def test_what_the_oracle_lacks_is_left_out_of_both_runs_and_named(tmp_path: Path) -> None:
    words = [*words_of("mixtral"), "model.router_aux_loss=0.01", "model.dropout=0.1"]
    words += ["model.embedding_grad_scale=0.1", "model.head_grad_scale=0.5"]
    certificate = beside_oracle([*words, "model.router_z_loss=1e-4"], tmp_path)
    assert certificate["verdict"] == "proven"
    parts = [part for part, _ in certificate["not_tried"]]
    left_out = {
        "router_aux_loss",
        "router_z_loss",
        "dropout",
        "embedding_grad_scale",
        "head_grad_scale",
    }
    assert {f"model.{key}" for key in left_out} <= set(parts)


# --- faults that all layouts share


def test_a_fault_that_all_layouts_share_shows_beside_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_batches(monkeypatch, shift_targets)
    assert entry_beside_oracle(words_of("llama"), tmp_path)["verdict"] == "wrong"


def test_a_difference_from_the_oracle_does_not_widen_its_own_bound() -> None:
    def record(loss: float) -> Record:
        return Record(steps=[{"loss": loss}], samples=[], names=[], tensors={})

    noise = Noise(perturbed_run=record(1.0 + 1e-15), unmoved_run=record(1.0))
    numbers = noise.values(record(1.1), lambda one: one.steps[0]["loss"])
    assert noise.number_bound(numbers) == pytest.approx(1e-12, rel=1)


# --- the command


@pytest.mark.parametrize(
    ("words", "name", "values"),
    [
        (["optimizer.name=muon"], "parity.oracle_rule", {"name": "muon"}),
        (["model.mup_base_hidden=24"], "parity.oracle_mup", {"base": 24}),
        (["model.mlp=geglu"], "convert.hf_not_expressible", {}),
        (
            [
                "data.reset_position_ids=true",
                'model.rope_scaling={kind = "dynamic", factor = 2.0, '
                "original_max_position_embeddings = 64}",
            ],
            "parity.oracle_dynamic",
            {},
        ),
        (
            ['optimizer.frozen=["embedding.*"]'],
            "parity.oracle_frozen",
            {"patterns": "embedding.*"},
        ),
    ],
)
def test_what_the_oracle_cannot_train_is_refused_by_name(
    words: list[str], name: str, values: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["parity", "examples/demo.toml", *words, "--oracle", "transformers"]) == 2
    assert shows(capfd.readouterr().err, name, **values)


@pytest.mark.parametrize(
    "words", [["precision.compute=bf16"], ["precision.compute=fp32", "precision.moments=bf16"]]
)
def test_a_run_that_is_not_fp32_throughout_is_compared_in_float64_alone(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    oracle = ["--oracle", "transformers", "--precision", "both"]
    assert cli.main(["parity", "examples/demo.toml", *words, *oracle]) == 2
    assert shows(capfd.readouterr().err, "parity.oracle_precision")


def test_the_rates_of_all_shapes_differ_in_the_few_steps() -> None:
    shapes = [("constant", ""), ("linear", ""), ("cosine", "")]
    shapes += [("wsd", tail) for tail in ("exponential", "linear", "cosine", "sqrt")]
    rates: set[tuple[float, ...]] = set()
    for schedule, tail in shapes:
        words = ["lr.decay=4", "lr.warmup=3", "lr.final=1e-5", f"lr.schedule={schedule}"]
        words += [f"lr.wsd_decay={tail}"] if tail else []
        config = load_run(None, [*words_of("llama"), *TRAIN, *words])
        small = with_rates_of(config, config)
        rates.add(tuple(rate_of(small.lr, number, STEPS) for number in range(STEPS)))
    assert len(rates) == len(shapes)


def test_the_certificate_names_the_oracle(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["examples/demo.toml", f"train.folder={tmp_path}", "--oracle", "transformers"]
    assert cli.main(["parity", *words, "--layouts", "tp=1"]) == 0
    said = capfd.readouterr().out
    assert "comparisons agree with the oracle" in said
    certificate = json.loads((tmp_path / "parity.json").read_text())
    assert "LlamaForCausalLM" in certificate["oracle"]
    assert "torch.optim.AdamW" in certificate["oracle"]


COMPILED = """
import torch
from pathlib import Path
from tempfile import TemporaryDirectory
from tests.parity.oracle_runs import beside_oracle, words_of
torch.set_num_threads(1)
for words in (words_of("qwen3_next"), [*words_of("llama"), "train.compile=leaves"]):
    with TemporaryDirectory() as folder:
        print(beside_oracle(words, Path(folder))["verdict"])
"""


@pytest.mark.slow
def test_torchs_compiler_works_after_transformers_has_computed_in_float64() -> None:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("proven") == 2
    assert "\ncompiled " in done.stdout
    assert "not compiled" not in done.stdout


def test_virtual_ranks_divide_the_sizes_of_the_small_run(tmp_path: Path) -> None:
    words = [*words_of("gpt_oss"), "train.numerics=canonical", "train.threads=1"]
    assert entry_beside_oracle(words, tmp_path)["verdict"] == "proven"
