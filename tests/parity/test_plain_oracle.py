"""`megaprec parity --oracle plain`: a run trains what a plain decoder of torch's functions trains, also
where transformers has no such model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megaprec.tokens.samples import Batch
from models.activations import ACTIVATIONS
from models.logical_shapes import logical_shapes
from models.presets import preset
from tests.families import CASES
from tests.parity.oracle_runs import (
    DOCUMENTS,
    OPTIMIZER,
    PACKED,
    assert_all_is_proven,
    assert_rounding_shows,
    beside_oracle,
    entry_beside_oracle,
    plant_in_batches,
    shift_targets,
    words_of,
)
from tests.refusals import raises, shows
from tools import cli
from tools.commands.parity import ORACLES
from tools.verify.oracle.plain_model import PlainModel

PLAIN = "plain"
ROUTER_LOSSES = ["model.router_aux_loss=0.05", "model.router_z_loss=0.01"]
GRADIENT_FACTORS = ["model.embedding_grad_scale=0.3", "model.head_grad_scale=0.4"]
# models and losses that transformers has not
BEYOND_TRANSFORMERS = {
    "llama with geglu": [*words_of("llama"), "model.mlp=geglu"],
    "factors of branches and logits": [
        *words_of("qwen3"),
        "model.branch_scale=0.3",
        "model.logit_divisor=2.5",
    ],
    "one norm for both branches, of embeddings and without weights": [
        *words_of("qwen3"),
        "model.parallel_residual=true",
        "model.shared_norm=true",
        "model.embedding_norm=true",
        "model.norm_weight=false",
    ],
    "a norm of embeddings and learned positions": [
        *words_of("gpt2"),
        "model.embedding_norm=true",
        "model.mlp=xielu",
    ],
    "wider heads and keys as values beside windows": [
        *words_of("llama"),
        "model.window=5",
        "model.window_layers=[0]",
        "model.window_rope_base=50.0",
        "model.global_head_dim=16",
        "model.global_kv_heads=1",
        "model.global_key_as_value=true",
        "model.value_norm=true",
        "model.layer_scalar=true",
    ],
    "layers without positions": [*words_of("qwen3"), "model.nope_layers=[1]"],
    "llama with caps, sinks and gates": [
        *words_of("llama"),
        "model.final_softcap=2.0",
        "model.attention_softcap=1.0",
        "model.attention_sinks=true",
        "model.attention_gate=true",
    ],
    "qwen3_next with norms around": [*words_of("qwen3_next"), "model.norm_at=around"],
    "losses of routers": [*words_of("mixtral"), *ROUTER_LOSSES],
    "modules ahead with experts": [
        *words_of("deepseek_v3 yarn"),
        *ROUTER_LOSSES,
        "model.mtp_layers=2",
    ],
    "modules ahead, tied, factors of gradients": [
        *words_of("qwen2"),
        *GRADIENT_FACTORS,
        "model.mtp_layers=1",
    ],
}


@pytest.mark.cases(4, sample=8)
@pytest.mark.parametrize("family", CASES)
def test_every_family_trains_what_the_plain_decoder_and_torch_train(
    family: str, tmp_path: Path
) -> None:
    entry = entry_beside_oracle(words_of(family), tmp_path, PLAIN)
    assert_all_is_proven(entry)


@pytest.mark.cases(2, sample=4)
@pytest.mark.parametrize("name", BEYOND_TRANSFORMERS)
def test_what_transformers_lacks_is_compared_and_nothing_of_it_left_out(
    name: str, tmp_path: Path
) -> None:
    certificate = beside_oracle(BEYOND_TRANSFORMERS[name], tmp_path, oracle=PLAIN)
    assert certificate["verdict"] == "proven"
    parts = [part for part, _ in certificate["not_tried"]]
    assert not [part for part in parts if part.startswith("model.")]


@pytest.mark.cases(2, sample=6)
@pytest.mark.parametrize("family", PACKED)
def test_documents_groups_other_norms_rates_and_averages_are_those_of_the_plain_decoder(
    family: str, tmp_path: Path
) -> None:
    words = [*words_of(family), *DOCUMENTS, *OPTIMIZER]
    entry = entry_beside_oracle(words, tmp_path, PLAIN)
    assert entry["verdict"] == "proven", entry.get("first")


@pytest.mark.cases(1, sample=3)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "nemotron_h"])
def test_in_fp32_the_difference_is_that_of_rounding(family: str, tmp_path: Path) -> None:
    assert_rounding_shows(words_of(family), tmp_path, PLAIN)


def test_what_it_cannot_say_of_documents_is_left_out_of_both_runs_and_named(
    tmp_path: Path,
) -> None:
    words = [*words_of("mixtral"), *ROUTER_LOSSES, *DOCUMENTS, "model.mtp_layers=1"]
    certificate = beside_oracle([*words, "model.dropout=0.1"], tmp_path, oracle=PLAIN)
    assert certificate["verdict"] == "proven"
    parts = [part for part, _ in certificate["not_tried"]]
    left_out = {"router_aux_loss", "router_z_loss", "mtp_layers", "dropout"}
    assert {f"model.{key}" for key in left_out} <= set(parts)


# --- faults that all layouts share


def targets_not_shifted(batch: Batch) -> None:
    batch.targets.copy_(batch.tokens)


@pytest.mark.parametrize("change", [shift_targets, targets_not_shifted])
def test_a_fault_that_all_layouts_share_shows_beside_the_plain_decoder(
    change: Callable[[Batch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_batches(monkeypatch, change)
    assert entry_beside_oracle(words_of("llama"), tmp_path, PLAIN)["verdict"] == "wrong"


# --- the command


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize(
    ("words", "name", "values"),
    [
        (["optimizer.name=muon"], "parity.oracle_rule", {"name": "muon"}),
        (["model.mup_base_hidden=24"], "parity.oracle_mup", {"base": 24}),
        (
            [
                "data.reset_attention_mask=true",
                'model.rope_scaling={kind = "dynamic", factor = 2.0, '
                "original_max_position_embeddings = 64}",
            ],
            "parity.oracle_dynamic",
            {},
        ),
        (
            ["model.factory=own.py:make", "log.sample="],
            "parity.oracle_factory",
            {"factory": "own.py:make"},
        ),
        (["--full"], "parity.oracle_full", {}),
        (
            ["precision.compute=bf16", "--precision", "configured"],
            "parity.oracle_precision",
            {"compute": "bf16"},
        ),
    ],
)
def test_what_no_oracle_can_train_is_refused_by_name(
    oracle: str,
    words: list[str],
    name: str,
    values: dict[str, object],
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["parity", "examples/demo.toml", *words, "--oracle", oracle]) == 2
    assert shows(capfd.readouterr().err, name, **values)


def test_the_certificate_names_the_plain_oracle(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["examples/demo.toml", f"train.folder={tmp_path}", "--oracle", PLAIN]
    assert cli.main(["parity", *words, "--layouts", "tp=1"]) == 0
    said = capfd.readouterr().out
    assert "comparisons agree with the oracle" in said
    assert "plain decoder" in said
    certificate = json.loads((tmp_path / "parity.json").read_text())
    assert "plain decoder" in certificate["oracle"]
    assert "torch.optim.AdamW" in certificate["oracle"]
    assert "transformers" not in certificate["oracle"]


def test_the_plain_decoder_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    config = preset("llama-demo").with_vocab(64)
    weights = {name: torch.ones(shape) for name, shape in logical_shapes(config).items()}
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    positions = torch.arange(4).view(1, 4)
    with raises("parity.oracle_unread", names="embedding_norm.weight"):
        more = {**weights, "embedding_norm.weight": torch.ones(config.hidden)}
        PlainModel(config, more).logits(tokens, positions)
    for row in (ACTIVATIONS["swiglu"], ACTIVATIONS["gelu"]):
        monkeypatch.setitem(ACTIVATIONS, "another", row)  # type: ignore[arg-type]
        other = config.model_copy(update={"mlp": "another"})
        with raises("parity.oracle_activation", mlp="another"):
            PlainModel(other, weights).logits(tokens, positions)
