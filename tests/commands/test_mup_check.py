"""megaprec mup-check: muP is proven at several widths, training without it is not, and each fault
of a parametrization is found, at widths where it shows."""

import json
import re
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import AS_BASE, Growth, Part
from megaprec.optim.rules import param_groups, width
from megaprec.optim.rules.muon.rule import Muon
from megaprec.optim.rules.update_rules import AdamW, UpdateRule
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.mup import Mup
from tests.other_systems import slow
from tests.ranks import run_ranks
from tests.refusals import shows
from tools.cli import main
from tools.verify.mup_check.measure import ActivationMeasures, Training, measure, measure_draws
from tools.verify.mup_check.slopes import Row, overall, rows
from tools.verify.mup_check.widths import LENGTH, default_widths, models_at
from tools.verify.parity.certificate import NOT_TRIED, PROVEN, WRONG

WIDTHS = [64, 128, 256]
SIZES: dict[str, Any] = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "ffn": 192,
    "max_positions": 64,
    "mup_base_hidden": 64,
}
LATENT = {"query_rank": 16, "kv_rank": 16, "rope_dim": 8, "nope_dim": 8, "value_dim": 16}
RUN = """
[model]
layers = 3
hidden = 128
heads = 8
ffn = 384
mup_base_hidden = 64
[train]
steps = 2
global_batch = 4
micro_batch = 2
seq_length = 32
folder = "run"
"""


def training(rule: UpdateRule | None = None, compute: str = "fp32", steps: int = 3) -> Training:
    return Training(rule or AdamW(), 3e-5, 0.1, 1.0, (), steps, 1234, LENGTH, plan(compute))


def rows_of(
    switches: dict[str, Any],
    growing: Any = "heads",
    rule: UpdateRule | None = None,
    widths: Sequence[int] = WIDTHS,
    draws: int = 1,
) -> list[Row]:
    model = ModelConfig(**{**SIZES, **switches})
    models = models_at(model, widths, growing)
    return rows(widths, [measure_draws(one, training(rule), draws) for one in models])


def wrong(all_rows: Sequence[Row]) -> dict[str, float]:
    """The slopes of the activations that are not proven."""
    return {row["activation"]: row["slopes"][-1] for row in all_rows if row["verdict"] == WRONG}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("switches", "growing", "rule"),
    [
        ({"family": "llama", "kv_heads": 2}, "heads", None),
        ({"family": "gemma3"}, "heads", None),
        ({"family": "llama", "mup_base_head_dim": 16}, "head_dim", None),
        *slow(({"family": "mixtral", "experts": 4}, "heads", Muon(ns_dtype="fp32"))),
    ],
    ids=["llama", "gemma3 tied", "wide heads", "mixtral muon"],
)
def test_mup_is_proven(switches: dict[str, Any], growing: Any, rule: UpdateRule | None) -> None:
    all_rows = rows_of(switches, growing, rule, draws=3)
    assert overall(all_rows) == PROVEN, wrong(all_rows)


@pytest.mark.cases(0, sample=3)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "olmo2", "qwen3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("rule", [AdamW(), Muon(ns_dtype="fp32", scale="keller-jordan")])
def test_mup_is_proven_in_every_family(family: str, rule: UpdateRule) -> None:
    switches: dict[str, Any] = {"family": family}
    if family == "gpt_oss":
        switches |= {"experts": 4, "experts_per_token": 2}
    if family == "deepseek_v3":
        switches |= {"experts": 4, "shared_experts": 64, "shared_gate": True, "latent": LATENT}
    all_rows = rows_of(switches, rule=rule, widths=[64, 128, 256, 512], draws=3)
    assert overall(all_rows) == PROVEN, wrong(all_rows)


def test_without_mup_all_that_matrices_make_moves_farther_in_wider_models() -> None:
    found = wrong(rows_of({"mup_base_hidden": 0}))
    assert set(found) >= {"layers.1.attention", "layers.1.mlp", "layers.1.residual", "logits"}
    assert all(slope > 0.5 for slope in found.values()), found


def no_rates(patch: pytest.MonkeyPatch) -> None:
    """The learning rate of the base model for all matrices."""
    patch.setattr(param_groups, "width_rate", lambda part, rule: 1.0)


def rates_twice(patch: pytest.MonkeyPatch) -> None:
    """The factor of the learning rate is applied a second time."""
    rate = width.width_rate
    patch.setattr(param_groups, "width_rate", lambda part, rule: rate(part, rule) ** 2)


def muon_scaled_twice(patch: pytest.MonkeyPatch) -> None:
    """Matrices of Muon get AdamW's factor besides their own, as in Megatron-LM before its pull
    request 3715."""
    rate = width.width_rate

    def twice(part: Part, rule: UpdateRule) -> float:
        return rate(part, rule) / part.growth.inputs

    patch.setattr(param_groups, "width_rate", twice)


def no_head_multiplier(patch: pytest.MonkeyPatch) -> None:
    """The head as it is in the base model."""
    growth_of = Mup.growth_of

    def without_head(self: Mup, part: Part) -> Growth:
        return AS_BASE if part.name == "head.weight" else growth_of(self, part)

    patch.setattr(Mup, "growth_of", without_head)
    patch.setattr(Mup, "readout", property(lambda self: 1.0))


def initial_weights_of_base(patch: pytest.MonkeyPatch) -> None:
    """Hidden matrices begin as in the base model."""
    patch.setattr(Mup, "hidden", property(lambda self: 1.0))


MUON = Muon(ns_dtype="fp32")
# what plants it, the update rule, an activation that shows it, and about with which slope
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], UpdateRule | None, str, float]] = {
    "no factor of the learning rate": (no_rates, None, "layers.0.mlp.inner update", 1.0),
    "the factor twice": (rates_twice, None, "layers.1.attention.output update", -1.0),
    "Muon scaled twice": (muon_scaled_twice, MUON, "layers.1.mlp.down update", -1.0),
    "no multiplier of the head": (no_head_multiplier, None, "head update", 1.0),
    "initial weights of the base": (initial_weights_of_base, None, "layers.1.residual", 1.0),
}


@pytest.mark.cases(2, sample=1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_where_it_is(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, rule, activation, slope = FAULTS[fault]
    plant(monkeypatch)
    found = wrong(rows_of({}, rule=rule))
    assert activation in found, found
    assert found[activation] == pytest.approx(slope, abs=0.3), found


@pytest.mark.slow
def test_scores_that_fall_as_the_root_of_a_heads_width_are_found_where_heads_become_wider() -> None:
    """1 / sqrt(d) is right only for heads of one width."""
    widths = [64, 128, 256, 512]
    heads = {"heads": 2}
    found = wrong(rows_of(heads, "head_dim", widths=widths))
    assert {name.split(".", 2)[-1] for name in found} == {"attention scores"}
    assert not wrong(rows_of({**heads, "mup_base_head_dim": 32}, "head_dim", widths=widths))


def measured_on_rank(mesh: DeviceMesh, model: ModelConfig) -> ActivationMeasures:
    return measure(model, training(compute="fp64"), mesh)


def test_a_model_that_is_cut_over_ranks_has_the_same_numbers() -> None:
    model = ModelConfig(**{**SIZES, "vocab": 256, "family": "mixtral", "experts": 4})
    whole = measure(model, training(compute="fp64"))
    for cut in run_ranks(measured_on_rank, {"tp": 2}, model=model):
        assert cut.initial == pytest.approx(whole.initial, rel=1e-10)
        for ours, theirs in zip(cut.changes, whole.changes, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-7)


def test_slopes_are_those_of_powers_of_the_width() -> None:
    def measured(power: float) -> ActivationMeasures:
        return ActivationMeasures({"x": 1.0, "logits": power}, [{"x": power, "logits": 1 / power}])

    (x, logits) = rows([2, 4, 8], [measured(1.0), measured(2.0), measured(4.0)])
    assert (x["slopes"], x["initial_slope"], x["verdict"]) == ([1.0], 0.0, WRONG)
    # logits may shrink, but not grow before training
    assert (logits["slopes"], logits["initial_slope"]) == ([-1.0], 1.0)
    assert "before training" in logits["why"]


def test_what_does_not_move_or_is_not_finite_is_not_tried() -> None:
    for size in (0.0, float("nan"), float("inf")):
        measured = ActivationMeasures({"x": 1.0}, [{"x": size}])
        (row,) = rows([2, 4], [measured, ActivationMeasures({"x": 1.0}, [{"x": 1.0}])])
        assert row["verdict"] == NOT_TRIED
        assert overall([row]) == NOT_TRIED


def test_models_of_other_widths_grow_in_all_that_matrices_sum_over() -> None:
    sizes = {**SIZES, "family": "deepseek_v3", "latent": LATENT, "experts": 4, "layers": 5}
    sizes |= {"dense_layers": [0, 1, 2], "dense_ffn": 128, "shared_experts": 32, "mtp_layers": 1}
    narrow, wide = models_at(ModelConfig(**sizes), [32, 128], "heads")
    assert (narrow.layers, narrow.mtp_layers, narrow.dense_layers) == (2, 0, (0,))
    assert (narrow.heads, wide.heads, wide.kv_heads, wide.head_dim) == (2, 8, 8, 16)
    assert (narrow.ffn, wide.ffn, wide.dense_ffn, wide.shared_experts) == (96, 384, 256, 64)
    assert (narrow.latent.kv_rank, wide.latent.query_rank, wide.latent.value_dim) == (8, 32, 16)
    _, wide = models_at(ModelConfig(**sizes), [32, 128], "head_dim")
    assert (wide.heads, wide.head_dim, wide.latent.value_dim) == (4, 32, 32)


def test_default_widths_begin_at_the_base_unless_that_takes_long() -> None:
    assert default_widths(ModelConfig(**SIZES), "heads") == [64, 128, 256, 512]
    large = ModelConfig(**{**SIZES, "hidden": 1024, "heads": 16, "mup_base_hidden": 512})
    assert default_widths(large, "heads") == [128, 256, 512, 1024]
    # four key/value heads, of which a model with fewer heads could not have fewer
    shared = ModelConfig(**{**SIZES, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1536})
    assert default_widths(shared, "heads") == [128, 256, 512, 1024]
    # three heads cannot be halved
    odd = ModelConfig(**{**SIZES, "hidden": 768, "heads": 3, "ffn": 768, "mup_base_hidden": 768})
    assert [log2(size / 768) for size in default_widths(odd, "heads")] == [0, 1, 2, 3]


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return file


@pytest.mark.slow
def test_the_command_writes_a_certificate_and_a_picture(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--widths", "256,64", "--plot", "mup.png", "--json"]
    assert main(["mup-check", str(run_file), "parallel.tensor=2", *options]) == 0
    certificate = json.loads(capsys.readouterr().out)
    assert certificate["verdict"] == PROVEN
    assert certificate["widths"] == [64, 256]
    assert certificate["parametrization"] == "muP, base hidden 64"
    assert certificate["left_out"] == ["model.layers = 3: 2 of them are measured"]
    assert {len(row["changes"]) for row in certificate["rows"]} == {4}
    assert Path("mup.png").read_bytes().startswith(b"\x89PNG")
    assert not Path("run").exists()


@pytest.mark.slow
def test_a_run_without_mup_is_not_proven_and_told_of_the_key(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["mup-check", str(run_file), "model.mup_base_hidden=0", "--widths", "64,128,256"]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "standard parametrization" in shown
    assert re.search(r"NOT proven: \d+ of 19 .*model\.mup_base_hidden", shown.replace("\n", " "))


@pytest.mark.parametrize(
    ("arguments", "code", "fields"),
    [
        (["--widths", "64"], "command.mup_check_widths", {"widths": "64"}),
        (["--widths", "64,x"], "command.mup_check_widths", {"widths": "64,x"}),
        (
            ["--widths", "64,100"],
            "command.mup_check_size",
            {"hidden": 100, "key": "heads", "width": 6.25, "unit": 16},
        ),
        (["--steps", "0"], "command.mup_check_steps", {"steps": 0}),
        (["--lr", "0"], "command.mup_check_rate", {"rate": 0.0}),
        (["--plot", "mup.jpg"], "plots.suffix", {"path": "mup.jpg"}),
        (["--plot", "none/mup.png"], "command.plot_folder", {"path": "none/mup.png"}),
    ],
)
def test_a_wrong_argument_is_told_before_anything_is_measured(
    arguments: list[str],
    code: str,
    fields: dict[str, Any],
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["mup-check", str(run_file), *arguments]) == 2
    assert shows(capsys.readouterr().err, code, **fields)


torch.set_num_threads(1)
