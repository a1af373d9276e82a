"""Args of another kind than Megatron writes, and files of ranks that do not belong together:
refused by name."""

import argparse
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.errors import UserError
from tests.other_systems import FOR_MEGATRON, write_folder
from tests.refusals import raises, sentence
from tools.cli import main
from tools.convert.formats import open_source
from tools.convert.megatron.args import model_of_args
from tools.convert.megatron.keys import ALLOWED_VALUES, READ_ARGUMENTS
from tools.convert.megatron.kinds import COUNT, KINDS, NUMBER, SIZE, SWITCH, WORD

# numbers or lists: read by rules
FORMS = {
    "no_rope_freq",
    "window_size",
    "window_attn_skip_freq",
    "moe_layer_freq",
    "linear_attention_freq",
    "spec",
}
ODD: dict[str, list[Any]] = {
    SWITCH: ["False", "no", 2, [True]],
    SIZE: ["4", 4.0, 0, -4, True, [4]],
    COUNT: ["4", 4.5, -1, True],
    WORD: [3, True, ["adam"]],
    NUMBER: ["1.0", float("nan"), float("inf"), True, [1.0, 2.0]],
}
pytestmark = pytest.mark.usefixtures("torch_files_read_here")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an iteration with two tensor ranks and two stages."""
    root = tmp_path_factory.mktemp("megatron")
    folder = write_folder(root / "hf", "qwen2_moe", **FOR_MEGATRON.get("qwen2_moe", {}))
    layout = ("--to", "megatron", "--no-verify", "--tp", "2", "--pp", "2")
    assert main(["convert", str(folder), str(root / "there"), *layout]) == 0
    return root / "there"


def file_of(folder: Path, rank: str) -> Path:
    (file,) = folder.rglob(f"mp_rank_{rank}/model_optim_rng.pt")
    return file


def edited(folder: Path, to: Path, rank: str, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(folder, to)
    file = file_of(to, rank)
    held = torch.load(file, weights_only=False)
    change(held)
    torch.save(held, file)
    return to


def test_every_argument_that_is_read_has_a_kind() -> None:
    assert not {*READ_ARGUMENTS} - KINDS.keys() - FORMS - ALLOWED_VALUES.keys()
    assert not KINDS.keys() & ALLOWED_VALUES.keys() and not FORMS & KINDS.keys()


def test_a_value_of_another_kind_is_refused_by_name(written: Path) -> None:
    args = vars(torch.load(file_of(written, "00_000"), weights_only=False)["args"])
    model_of_args(args, None)
    for key, kind in KINDS.items():
        for value in ODD[kind]:
            with pytest.raises(
                UserError,
                match=sentence(
                    "convert.megatron_argument_kind", key=key, kind=re.compile(f"^{kind}")
                ),
            ):
                model_of_args({**args, key: value}, None)
    model_of_args(
        {**args, "moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.01]}, None
    )


@pytest.mark.parametrize("skip", [[], [1, 0, 1], [1, 0, 1, 0, 1]])
def test_windows_are_said_of_every_layer_and_no_other(skip: list[int], written: Path) -> None:
    args = vars(torch.load(file_of(written, "00_000"), weights_only=False)["args"])
    with raises("convert.megatron_window_freq", num_layers=4):
        model_of_args({**args, "window_size": (4, 0), "window_attn_skip_freq": skip}, None)


@pytest.mark.parametrize(
    "key", ["expert_model_parallel_size", "expert_tensor_parallel_size", "num_experts"]
)
def test_what_ranks_are_found_by_has_its_kind_too(key: str, written: Path, tmp_path: Path) -> None:
    folder = edited(
        written, tmp_path / "odd", "00_000", lambda held: setattr(held["args"], key, "2")
    )
    with pytest.raises(
        UserError,
        match=sentence(
            "convert.megatron_argument_kind", key=key, value="2", kind=re.compile("a whole number")
        ),
    ):
        open_source(folder)


def other_args(held: dict[str, Any]) -> None:
    held["args"] = argparse.Namespace(**{**vars(held["args"]), "norm_epsilon": 0.3})


def in_chunks(held: dict[str, Any]) -> None:
    held["model0"], held["model1"] = held.pop("model"), {}


def half_a_tensor(held: dict[str, Any]) -> None:
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    held["model"][name] = held["model"][name].int()


def half_a_copy(held: dict[str, Any]) -> None:
    name = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    held["model"][name] = held["model"][name].double()


def stepped(step: int, scale: float = 0.0) -> dict[str, Any]:
    """The state of an optimizer, with a loss scaler if `scale` is given, but without moments."""
    numbers = dict.fromkeys(("scale", "growth_tracker", "hysteresis_tracker"), scale)
    return {
        "optimizer": {"state": {}, "param_groups": [{"step": step}]},
        "grad_scaler": numbers if scale else None,
    }


def shortened(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda held: held["model"].update({name: held["model"][name][:-1].clone()})


EMBEDDING = "embedding.word_embeddings.weight"
DOWN = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"


@pytest.mark.parametrize(
    ("kind", "name", "rank"),
    [("qwen2", EMBEDDING, "00"), ("qwen2", EMBEDDING, "01"), ("deepseek_v3", DOWN, "01")],
)
def test_parts_of_other_shapes_than_the_first_are_refused(
    kind: str, name: str, rank: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "hf", kind, **FOR_MEGATRON.get(kind, {}))
    layout = ("--to", "megatron", "--no-verify", "--tp", "2")
    assert main(["convert", str(folder), str(tmp_path / "there"), *layout]) == 0
    with pytest.raises(UserError, match=sentence("convert.ranks_shapes", name=name)):
        open_source(edited(tmp_path / "there", tmp_path / "odd", rank, shortened(name)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_args, sentence("convert.megatron_other_run", key="norm_epsilon", value=0.3)),
        (
            in_chunks,
            sentence(
                "convert.megatron_virtual_stages",
                num_chunks=2,
                other_folder=re.compile("model"),
                other_num_chunks=1,
            ),
        ),
        (
            half_a_tensor,
            sentence(
                "convert.ranks_dtypes",
                name=re.compile(r"linear_qkv\.weight"),
                dtypes="float32 and int32",
            ),
        ),
        (
            half_a_copy,
            sentence(
                "convert.ranks_dtypes",
                name=re.compile(r"linear_qkv\.layer_norm_weight"),
                dtypes="float32 and float64",
            ),
        ),
        (
            lambda held: held.update(model1={}),
            sentence("convert.megatron_beside_whole", surplus="model1"),
        ),
        (lambda held: held.update(iteration="x"), "iteration = 'x'"),
        (lambda held: held.update(iteration=-4), "iteration = -4"),
        (
            lambda held: held.update(opt_param_scheduler={"num_steps": "x"}),
            sentence(
                "convert.megatron_argument_kind",
                key="num_steps",
                value="x",
                kind=re.compile("a whole number"),
            ),
        ),
        (
            lambda held: held.update(iteration=7),
            sentence("convert.megatron_other_time", clock="iteration", value=7, expected=0),
        ),
        (
            lambda held: held.update(opt_param_scheduler={"num_steps": 3}),
            sentence("convert.megatron_other_time", clock="num_steps of the scheduler", value=3),
        ),
        (
            lambda held: held.update(optimizer=stepped(3)),
            sentence(
                "convert.megatron_other_time",
                clock="the step of the optimizer",
                value=3,
                expected=0,
            ),
        ),
        (
            lambda held: held.update(optimizer=stepped(0, 4.0)),
            sentence(
                "convert.megatron_other_time",
                clock="the state of the loss scaler",
                value=re.compile(r"4\.0"),
            ),
        ),
        (
            lambda held: held.update(checkpoint_version=1.0),
            sentence("convert.megatron_version", version=1.0),
        ),
        (lambda held: held.update(checkpoint_version="3"), r"checkpoint_version = '3'"),
        (lambda held: held.update(checkpoint_version=4.0), r"checkpoint_version = 4.0"),
        (lambda held: held.pop("args"), sentence("convert.megatron_rank_no_args")),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    change: Callable[[dict[str, Any]], object], said: str, written: Path, tmp_path: Path
) -> None:
    rank = "00_000" if said.startswith(("iteration =", "num_steps =")) else "01_000"
    with pytest.raises(UserError, match=said):
        open_source(edited(written, tmp_path / "odd", rank, change))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mp_rank_00", sentence("convert.megatron_rank_twice")),
        ("mp_rank_007", sentence("convert.megatron_folder_name")),
    ],
)
def test_a_folder_more_than_there_are_ranks_is_refused(
    name: str, said: str, written: Path, tmp_path: Path
) -> None:
    shutil.copytree(written, tmp_path / "odd")
    rank = file_of(tmp_path / "odd", "00_000").parent
    shutil.copytree(rank, rank.parent / name)
    with pytest.raises(UserError, match=said):
        open_source(tmp_path / "odd")


def test_args_that_say_another_number_of_ranks_are_noted(written: Path, tmp_path: Path) -> None:
    def said(held: dict[str, Any]) -> None:
        held["args"].tensor_model_parallel_size = 4

    assert not open_source(written).facts.notes
    (note,) = open_source(edited(written, tmp_path / "odd", "00_000", said)).facts.notes
    assert note.startswith("args say tensor_model_parallel_size = 4, but there are files of 2")


def test_tensor_ranks_with_each_others_names_are_noted(written: Path, tmp_path: Path) -> None:
    folder = edited(written, tmp_path / "swapped", "00_000", lambda held: held)
    for stage in ("000", "001"):
        first, second = (file_of(folder, f"{tensor}_{stage}").parent for tensor in ("00", "01"))
        first.rename(folder / "kept")
        second.rename(first)
        (folder / "kept").rename(second)
    (note,) = open_source(folder).facts.notes
    assert "say rank = 1, which has another folder: files may have each other's names" in note
    converted = in_all(written, tmp_path / "one", lambda held: setattr(held["args"], "rank", 0))
    assert not open_source(converted).facts.notes, (
        "programs that convert write the same number into all"
    )


def in_all(folder: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the file of every rank."""
    for n, rank in enumerate(("00_000", "01_000", "00_001", "01_001")):
        folder = edited(folder, to / str(n), rank, change)
    return folder


def test_a_padded_vocabulary_of_other_rows_is_noted_and_a_shorter_one_refused(
    written: Path, tmp_path: Path
) -> None:
    padded = in_all(
        written, tmp_path / "more", lambda held: setattr(held["args"], "padded_vocab_size", 1024)
    )
    (note,) = open_source(padded).facts.notes
    assert note.startswith(
        "args say padded_vocab_size = 1024, but embedding.word_embeddings.weight has 256 rows"
    )
    shorter = in_all(
        written, tmp_path / "less", lambda held: setattr(held["args"], "padded_vocab_size", 100)
    )
    with raises("convert.megatron_vocab", padded=100, vocab=131):
        open_source(shorter)


@pytest.mark.parametrize("optimizer", [3, {"state": {}}])
def test_an_optimizer_of_no_known_form_is_told_as_unread(
    optimizer: object, written: Path, tmp_path: Path
) -> None:
    odd = in_all(written, tmp_path, lambda held: held.update(optimizer=optimizer))
    assert (
        "the optimizer's state" in open_source(odd).facts.unread
        and not open_source(written).facts.unread
    )


def test_files_of_stages_with_each_others_names_are_refused(written: Path, tmp_path: Path) -> None:
    folder = edited(written, tmp_path / "swapped", "00_000", lambda held: held)
    for tensor in ("00", "01"):
        first, last = (file_of(folder, f"{tensor}_00{stage}").parent for stage in (0, 1))
        first.rename(folder / "kept")
        last.rename(first)
        (folder / "kept").rename(last)
    with raises("convert.layer_of_stage", owner=1, num_stages=2):
        open_source(folder)
