"""Megatron's args and files of hybrid models and gated delta nets: each is read, or refused by
name."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from tests.other_systems import FOR_MEGATRON, megatrons, write_folder
from tests.refusals import raises, shows
from tools.cli import main
from tools.convert.core.names import megatron
from tools.convert.core.rules import matches
from tools.convert.formats import open_source
from tools.convert.hf.config import from_hugging_face
from tools.convert.megatron.args import args_of, model_of_args, omitted_fields
from tools.convert.megatron.hybrid_layers import SPECS, allocated
from tools.convert.megatron.order import stages_of

KIND = "nemotron_h"
HYBRID = from_hugging_face(megatrons(KIND))
DELTA = ModelConfig(
    family="qwen3_next",
    layers=4,
    hidden=24,
    heads=4,
    head_dim=8,
    vocab=131,
    norm_unit_offset=False,
    delta_net={"key_heads": 2, "value_heads": 4, "key_dim": 5, "value_dim": 7},  # type: ignore[arg-type]
)


def args(model: ModelConfig, **changes: Any) -> dict[str, Any]:
    return args_of(model, 256, 1, 1, True, torch.float32) | changes


def test_a_model_is_hybrid_by_its_modules_its_pattern_or_its_ratios() -> None:
    said = args(HYBRID)
    plain = {key: value for key, value in said.items() if "hybrid" not in key and key != "spec"}
    assert not model_of_args(plain, None).hybrid_pattern
    for changes, pattern in (
        ({"spec": SPECS[1]}, "MMMM"),
        ({"hybrid_override_pattern": "M*-M"}, "M*-M"),
        ({"hybrid_layer_pattern": "M*|-M"}, "M*-M"),
        ({"hybrid_override_pattern": "*---", "hybrid_layer_pattern": "*---"}, "*---"),
        ({"hybrid_attention_ratio": 0.25, "hybrid_mlp_ratio": 0.25}, "MM*-"),
        (
            {
                "hybrid_attention_ratio": 0.25,
                "hybrid_mlp_ratio": 0.5,
                "hybrid_override_pattern": "-*-M",
            },
            "-*-M",
        ),
    ):
        model = model_of_args(plain | changes, None)
        assert model.hybrid_pattern == pattern
        assert bool(model.mamba) == ("M" in pattern)


def test_attention_lies_evenly_and_feed_forwards_evenly_from_the_end() -> None:
    assert allocated(9, 0.0, 0.0) == "M" * 9
    assert allocated(10, 0.2, 0.3) == "MM-*M-*MM-"
    assert allocated(4, 0.25, 0.25) == "MM*-"


@pytest.mark.parametrize(
    ("changes", "code", "fields"),
    [
        ({"hybrid_override_pattern": "ME*-"}, "megatron_hybrid_letter", {"letter": "E"}),
        ({"hybrid_override_pattern": "M*-M/M*"}, "megatron_hybrid_letter", {}),
        ({"hybrid_override_pattern": "M*-"}, "megatron_hybrid_length", {"kinds": 3, "layers": 4}),
        ({"hybrid_layer_pattern": "MMMM"}, "megatron_hybrid_two", {"layer": "MMMM"}),
        ({"hybrid_attention_ratio": 0.5}, "megatron_hybrid_counts", {"attention": 0.5}),
        ({"hybrid_mlp_ratio": 1.5}, "megatron_hybrid_ratios", {"mlp": 1.5}),
        ({"spec": ["my.layers", "spec"]}, "megatron_spec", {"spec": "my.layers spec"}),
        ({"qk_layernorm": True}, "megatron_hybrid_qk_norm", {}),
        ({"norm_epsilon": 1e-6}, "megatron_mamba_eps", {"eps": 1e-6}),
        ({"mamba_num_heads": None, "mamba_head_dim": 5}, "megatron_mamba_heads", {"width": 48}),
        ({"squared_relu": True, "swiglu": True}, "megatron_squared_gated", {"key": "swiglu"}),
        ({"window_size": (4, 0)}, "not_beside", {"key": "hybrid_pattern", "other": "window"}),
        ({"mamba_state_dim": 0}, "megatron_argument_kind", {"key": "mamba_state_dim"}),
        (
            {"hybrid_override_pattern": None, "spec": None},
            "megatron_hybrid_unsaid",
            {},
        ),
    ],
)
def test_what_no_hybrid_model_here_is_is_refused_by_name(
    changes: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    area = "model" if code == "not_beside" else "convert"
    with raises(f"{area}.{code}", **fields):
        model_of_args(args(HYBRID, **changes), None)


def test_the_number_of_heads_follows_from_the_hidden_size() -> None:
    model = model_of_args(args(HYBRID, mamba_num_heads=None, mamba_head_dim=6), None)
    assert (model.mamba.heads, model.mamba.head_dim) == (8, 6)


def test_gated_delta_nets_are_in_all_but_each_nth_layer_or_in_those_listed() -> None:
    for frequency, layers in ((4, (0, 1, 2)), (2, (0, 2)), ([0, 1, 1, 0], (1, 2)), (1, ())):
        model = model_of_args(args(DELTA, linear_attention_freq=frequency), None)
        assert model.delta_layers == layers
        assert bool(model.delta_net) == bool(layers)
    again = model_of_args(args(DELTA, experimental_attention_variant="gdn"), None)
    assert again.delta_net == DELTA.delta_net
    assert again.attention_gate


@pytest.mark.parametrize(
    ("changes", "code", "fields"),
    [
        ({"swiglu": False}, "megatron_delta_activation", {"mlp": "gelu_exact"}),
        ({"normalization": "LayerNorm", "qk_layernorm": False}, "megatron_delta_norm", {}),
        ({"linear_attention_freq": None}, "megatron_delta_form", {}),
        ({"linear_attention_freq": [1, 0]}, "megatron_delta_length", {"layers": 4}),
        ({"rotary_interleaved": True}, "megatron_gate_interleaved", {}),
        ({"experimental_attention_variant": "dsa"}, "megatron_argument_only", {"value": "dsa"}),
        ({"apply_layernorm_1p": True}, "megatron_argument_only", {"key": "apply_layernorm_1p"}),
    ],
)
def test_what_no_gated_delta_net_here_is_is_refused_by_name(
    changes: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with raises(f"convert.{code}", **fields):
        model_of_args(args(DELTA, **changes), None)


def test_a_shortest_time_step_is_left_out_and_said() -> None:
    model = from_hugging_face({**megatrons(KIND), "time_step_min": 0.001})
    (said,) = [line for line in omitted_fields(model, args(model)) if "least_step" in line]
    assert said.startswith("mamba.least_step = 0.001")
    assert not [line for line in omitted_fields(HYBRID, args(HYBRID)) if "least_step" in line]


def test_a_convolution_over_other_than_4_tokens_is_refused() -> None:
    model = from_hugging_face({**megatrons(KIND), "conv_kernel": 3})
    with raises("convert.megatron_not_expressible", lacking="mamba.kernel = 3 (its own is 4)"):
        args(model)


def test_stages_end_where_the_pattern_says() -> None:
    expected = matches(megatron(True, False, HYBRID), HYBRID)
    said = args(HYBRID, pipeline_model_parallel_size=2, hybrid_override_pattern="M|*-M")
    stages = stages_of(expected, said, HYBRID)
    layers = [
        {one.foreign.split(".")[2] for one in stage if ".layers." in one.foreign}
        for stage in stages
    ]
    assert layers == [{"0"}, {"1", "2", "3"}]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face, as hf, and the same model of Megatron over two tensor ranks and two
    stages."""
    root = tmp_path_factory.mktemp("hybrid")
    write_folder(root / "hf", KIND, **FOR_MEGATRON[KIND])
    layout = ("--to", "megatron", "--no-verify", "--tp", "2", "--pp", "2")
    assert main(["convert", str(root / "hf"), str(root / "megatron"), *layout]) == 0
    return root


def in_all(folder: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(folder, to)
    for file in to.rglob("model_optim_rng.pt"):
        held = torch.load(file, weights_only=False)
        change(held)
        torch.save(held, file)
    return to


def renamed(held: dict[str, Any]) -> None:
    """As versions of 2026 name the convolution."""
    held["model"] = {
        name.replace("conv1d.", "conv1d_"): values for name, values in held["model"].items()
    }


def split_by_pattern(held: dict[str, Any]) -> None:
    said = vars(held["args"]) | {"hybrid_override_pattern": None, "hybrid_layer_pattern": "M*|-M"}
    held["args"] = argparse.Namespace(**said)


@pytest.mark.usefixtures("torch_files_read_here")
@pytest.mark.parametrize("change", [lambda held: None, renamed, split_by_pattern])
def test_files_of_all_versions_come_back_bit_for_bit(
    change: Callable[[dict[str, Any]], object], written: Path, tmp_path: Path
) -> None:
    folder = in_all(written / "megatron", tmp_path / "megatron", change)
    back = tmp_path / "back"
    assert main(["convert", str(folder), str(back), "--to", "hf", "--no-verify"]) == 0
    before = open_source(written / "hf")
    after = open_source(back)
    assert after.model == before.model
    assert after.shapes == before.shapes
    assert all(torch.equal(after.read(key), before.read(key)) for key in before.shapes)


@pytest.mark.usefixtures("torch_files_read_here")
def test_parts_of_other_sizes_than_the_args_say_are_refused(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wider(held: dict[str, Any]) -> None:
        held["args"] = argparse.Namespace(**vars(held["args"]) | {"mamba_state_dim": 9})

    folder = in_all(written / "megatron", tmp_path / "megatron", wider)
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 2
    assert shows(capsys.readouterr().err, "convert.ranks_shapes")


def test_layers_of_transformer_engine_alone_are_not_written_as_others(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", str(written / "hf"), str(tmp_path / "there"), "--to", "megatron"]
    assert main([*command, "--layers", "local"]) == 2
    assert shows(capsys.readouterr().err, "convert.target_local_layers")
    assert main([*command, "--tp", "8"]) == 2
    assert shows(capsys.readouterr().err, "convert.target_heads", tp=8)
