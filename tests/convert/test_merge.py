"""`megaprec merge`: the mean of checkpoints is numpy's, whatever formats and layouts they are in."""

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from megaprec.checkpoint.reader import Store
from megaprec.text.training import train_sentencepiece
from models.feed_forward.router import is_correction
from tests.other_systems import FOR_MEGATRON, IN_MEGATRON, usually, write_folder
from tests.refusals import raises, shows
from tests.runs import checkpoint, train, train_on, write_run
from tools.cli import main
from tools.convert.averages import given_weights, weights_of_average
from tools.convert.core import target
from tools.convert.core.target import convert
from tools.convert.formats import open_source
from tools.convert.merge import merge
from tools.convert.native import native_target

pytestmark = pytest.mark.usefixtures("torch_files_read_here")
Doubles = NDArray[np.float64]
NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.float64: np.float64}


def run(*arguments: object) -> None:
    assert main([*map(str, arguments)]) == 0


def refused(*arguments: object) -> None:
    assert main([*map(str, arguments)]) == 2


def silent(moved: int, said: str) -> None: ...


def moved(folder: Path, to: Path, seed: int) -> Path:
    """A copy of a Hugging Face folder with other weights."""
    shutil.copytree(folder, to)
    dice = torch.Generator().manual_seed(seed)
    stored = {}
    for name, values in load_file(folder / "model.safetensors").items():
        noise = torch.randn(values.shape, generator=dice).mul_(0.1)
        stored[name] = (values.float() + noise).to(values.dtype)
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    return to


def weights_in(folder: Path) -> dict[str, Tensor]:
    source = open_source(folder)
    return {key: source.read(key) for key in source.keys("weight")}


def rounded(values: Doubles, dtype: torch.dtype) -> Doubles:
    """Doubles rounded to nearest, ties to even, to the numbers of another dtype."""
    if dtype in NUMPY:
        return values.astype(NUMPY[dtype]).astype(np.float64)
    # bfloat16 has 45 bits fewer than a double, and no number here is subnormal in it
    bits = values.view(np.int64)
    half = (1 << 44) - 1 + ((bits >> 45) & 1)
    return ((bits + half) >> 45 << 45).view(np.float64)


def mean(inputs: Sequence[Mapping[str, Tensor]], shares: Sequence[float], key: str) -> Doubles:
    """The sum of products in doubles, in the order of the inputs."""
    total = shares[0] * inputs[0][key].double().numpy()
    for values, share in zip(inputs[1:], shares[1:], strict=True):
        total = total + share * values[key].double().numpy()
    return total


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with "native", which tensor 2 x pipeline 2 ranks wrote, "hf" of bf16, and "megatron"
    of 2 ranks."""
    folder = tmp_path_factory.mktemp("merge")
    run_folder = train_on(write_run(folder), "model.dropout=0", tensor=2, pipeline=2)
    (folder / "native").symlink_to(checkpoint(run_folder, 3))
    run("convert", checkpoint(run_folder, 6), folder / "hf", "--dtype", "bf16")
    run("convert", checkpoint(run_folder, 6), folder / "plain", "--no-verify")
    moved(folder / "plain", folder / "other", seed=1)
    run("convert", folder / "other", folder / "megatron", "--to", "megatron", "--tp", 2)
    return folder


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("to", ["megaprec", "hf", "megatron"])
@pytest.mark.parametrize("dtype", ["", *DTYPES])
def test_a_mean_of_mixed_formats_and_layouts_is_numpys_bit_for_bit(
    to: str, dtype: str, room: Path, tmp_path: Path
) -> None:
    folders = [room / "native", room / "hf", room / "megatron"]
    given = ["--to", to, "--no-verify"] + (["--dtype", dtype] if dtype else [])
    run("merge", *folders, "-o", tmp_path / "mean", "--weights", "0.2,0.3,0.5", *given)
    inputs = [weights_in(folder) for folder in folders]
    out = weights_in(tmp_path / "mean")
    assert out.keys() == inputs[0].keys()
    for key, values in out.items():
        assert values.dtype == DTYPES.get(dtype, torch.float32)
        expected = rounded(mean(inputs, (0.2, 0.3, 0.5), key), values.dtype)
        assert np.array_equal(values.double().numpy(), expected), key


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("kind", usually(("gpt2", "gpt_neox", "deepseek_v3", "mixtral")))
def test_tensors_that_formats_pack_differently_are_each_read_once(
    kind: str, tmp_path: Path
) -> None:
    hf = write_folder(tmp_path / "a", kind, torch.bfloat16, **FOR_MEGATRON.get(kind, {}))
    moved(hf, tmp_path / "b", seed=1)
    moved(hf, tmp_path / "c", seed=2)
    run("convert", tmp_path / "b", tmp_path / "native", "--no-verify")
    shares = (0.5, 0.3, 0.2)
    others = [tmp_path / "native", tmp_path / "c"]
    if kind in IN_MEGATRON:
        run("convert", tmp_path / "c", tmp_path / "m", "--to", "megatron", "--no-verify")
        others[1] = tmp_path / "m"
    for folders in ([hf, *others], [*others[::-1], hf]):
        sources = [open_source(folder) for folder in folders]
        source = merge(sources, shares, None)
        shutil.rmtree(tmp_path / "mean", ignore_errors=True)
        convert(source, native_target(source, None), tmp_path / "mean", silent)
        assert all(count == 1 for each in sources for count in each.loads.values())
        inputs = [weights_in(folder) for folder in folders]
        for key, values in weights_in(tmp_path / "mean").items():
            expected = inputs[-1][key].double().numpy()
            if not is_correction(key):
                expected = rounded(mean(inputs, shares, key), values.dtype)
            assert np.array_equal(values.double().numpy(), expected), key


def test_the_mean_of_a_checkpoint_and_itself_is_that_checkpoint(room: Path, tmp_path: Path) -> None:
    native = room / "native"
    run("merge", native, native, native, "-o", tmp_path / "mean", "--average", "ema:0.3")
    before = weights_in(native)
    after = weights_in(tmp_path / "mean")
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_corrections_of_routers_are_the_last_inputs_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = write_folder(tmp_path / "a", "deepseek_v3")
    moved(hf, tmp_path / "b", seed=1)
    run("merge", hf, tmp_path / "b", "-o", tmp_path / "mean", "--dtype", "bf16", "--no-verify")
    said = capsys.readouterr().out
    last = weights_in(tmp_path / "b")
    out = weights_in(tmp_path / "mean")
    corrections = [key for key in out if is_correction(key)]
    assert len(corrections) > 1
    for key in corrections:
        assert torch.equal(out[key], last[key]) and out[key].dtype == torch.float32
    (line,) = [line for line in said.splitlines() if "corrections of routers" in line]
    assert corrections[0] in line and f"{tmp_path / 'b'}" in line


# the tails of a learning rate that the means stand for
TAILS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "sqrt": lambda x: 1 - math.sqrt(x),
}


@pytest.mark.parametrize("count", [2, 3, 7, 40])
@pytest.mark.parametrize("average", TAILS)
def test_later_checkpoints_weigh_together_what_the_tail_is_there(average: str, count: int) -> None:
    """The factor of a step is the weight of all checkpoints after it."""
    shares = weights_of_average(average, count)
    for number in range(count):
        assert math.isclose(sum(shares[number:]), TAILS[average](number / count), abs_tol=1e-14)


def test_uniform_weights_are_equal() -> None:
    assert weights_of_average("uniform", 4) == [0.25] * 4


@pytest.mark.parametrize("decay", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("count", [2, 3, 9])
def test_ema_weights_are_those_of_the_moving_average(decay: float, count: int) -> None:
    values = np.random.default_rng(3).normal(size=count)
    average = values[0]
    for value in values[1:]:
        average = decay * average + (1 - decay) * value
    shares = weights_of_average(f"ema:{decay}", count)
    assert math.isclose(np.dot(shares, values), average, rel_tol=1e-13)
    assert math.isclose(sum(shares), 1, rel_tol=1e-14)


@pytest.mark.parametrize(
    "name", ["mean", "ema", "ema:", "ema:x", "ema:0", "ema:1", "ema:nan", "ema:-1", "Sqrt", ""]
)
def test_an_average_that_is_none_is_refused(name: str) -> None:
    with raises("convert.merge_average", average=name):
        weights_of_average(name, 2)


@pytest.mark.parametrize("text", ["1,x", "-0.5,1.5", "nan,1", "inf,1", "", "0.5,,0.5"])
def test_weights_that_are_no_numbers_of_0_or_more_are_refused(text: str) -> None:
    with raises("convert.merge_weights_form", weights=text):
        given_weights(text, 2)


def test_weights_must_be_one_for_each_and_sum_to_one() -> None:
    with raises("convert.merge_weights_count", given=2, inputs=3):
        given_weights("0.5,0.5", 3)
    with raises("convert.merge_weights_sum", total="inf"):
        given_weights("1e308,1e308", 2)
    with raises("convert.merge_weights_sum", total="1.1"):
        given_weights("0.5,0.6", 2)
    assert given_weights("0.1,0.1,0.1,0.7", 4) == [0.1, 0.1, 0.1, 0.7]


def test_one_checkpoint_is_not_merged(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused("merge", room / "hf", "-o", room / "mean")
    assert shows(capsys.readouterr().err, "convert.merge_one", path=room / "hf")


def test_a_folder_that_is_there_is_left_alone(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused("merge", room / "hf", room / "native", "-o", room / "hf")
    assert shows(capsys.readouterr().err, "command.folder_exists", destination=room / "hf")


def test_models_that_differ_are_refused_with_key_and_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_folder(tmp_path / "a", "llama")
    write_folder(tmp_path / "wider", "llama", intermediate_size=44, rope_theta=5e5)
    write_folder(tmp_path / "gpt2", "gpt2")
    before = sorted(tmp_path.rglob("*"))
    refused("merge", first, first, tmp_path / "wider", "-o", tmp_path / "mean")
    told = capsys.readouterr().err.splitlines()
    expected = []
    for key, ours, theirs in (
        ("ffn", 40, 44),
        ("rope_base", 10000.0, 500000.0),
        ("dense_ffn", 40, 44),
    ):
        expected.append(
            f"model.{key} is {ours} in {first} and {theirs} in {tmp_path / 'wider'}: only "
            "checkpoints of one model have a mean"
        )
    assert sorted(told) == sorted(expected)
    refused("merge", first, tmp_path / "gpt2", "-o", tmp_path / "mean")
    said = capsys.readouterr().err
    assert shows(
        said,
        "convert.merge_model_differs",
        key="model.family",
        value='"llama"',
        other_value='"gpt2"',
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_what_only_training_goes_by_may_differ(room: Path, tmp_path: Path) -> None:
    """A Hugging Face folder of a Llama has no place for dropout."""
    file = write_run(tmp_path)
    assert train(file, "train.steps=1", "model.dropout=0.25") == 0
    run("convert", tmp_path / "run", tmp_path / "hf", "--no-verify")
    run("merge", tmp_path / "run", tmp_path / "hf", "-o", tmp_path / "mean")
    assert open_source(tmp_path / "mean").model.dropout == 0.25


def test_other_tokenizers_are_refused_and_a_missing_one_is_not(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(room / "hf", other)
    (other / "tokenizer.json").unlink()
    train_sentencepiece(["another text of other words, 0123456789"] * 9, other / "tokenizer", 290)
    refused("merge", room / "native", other, "-o", tmp_path / "mean")
    assert shows(
        capsys.readouterr().err,
        "convert.merge_tokenizer_differs",
        file=re.compile(r"native/text\.model$"),
        other_file=other / "tokenizer.model",
    )
    assert not (tmp_path / "mean").exists()
    # a Megatron checkpoint has none, and the mean has that of the next
    run("merge", room / "megatron", room / "native", "-o", tmp_path / "mean", "--to", "megaprec")
    assert (tmp_path / "mean/text.model").is_file()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_number_that_is_not_finite_is_refused_with_its_tensor(
    number: float, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_folder(tmp_path / "a", "llama")
    second = moved(first, tmp_path / "b", seed=1)
    stored = load_file(second / "model.safetensors")
    stored[name].view(-1)[5] = number
    save_file(stored, second / "model.safetensors", metadata={"format": "pt"})
    before = sorted(tmp_path.rglob("*"))
    # also where it counts for nothing
    refused("merge", first, second, "-o", tmp_path / "mean", "--weights", "1,0", "--no-verify")
    key = "weight/final_norm.weight" if "norm" in name else "weight/layers.1.mlp.up.weight"
    assert shows(capsys.readouterr().err, "convert.merge_not_finite", path=second, key=key)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_record_of_a_mean_names_inputs_and_weights(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("merge", room / "native", room / "hf", "-o", tmp_path / "mean", "--average", "sqrt")
    said = capsys.readouterr().out
    shares = [math.sqrt(0.5), 1 - math.sqrt(0.5)]
    index = Store(tmp_path / "mean").index
    assert index["merged_from"] == [
        {"format": "megaprec", "folder": str(room / "native"), "weight": shares[0]},
        {"format": "hf", "folder": str(room / "hf"), "weight": shares[1]},
    ]
    assert "converted_from" not in index
    assert f"0.707107 x {room / 'native'}\n0.292893 x {room / 'hf'}\n" in said
    assert "not read: exp_avg, exp_avg_sq" in said


@pytest.mark.parametrize("to", ["megaprec", "hf"])
def test_a_mean_is_evaluated_and_trained_and_merged_again(
    to: str, room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mean"
    run("merge", room / "native", room / "hf", "-o", out, "--to", to, "--no-verify")
    capsys.readouterr()
    run("evaluate", out, "--data", room / "text.txt", "--max-chars", 2000, "--json")
    assert math.isfinite(json.loads(capsys.readouterr().out)["sets"][0]["loss"])
    keys = ["train.steps=1", "model.dropout=0", f"data.cache={tmp_path / 'data'}"]
    places = [f"train.folder={tmp_path / 'run'}", f"train.init_from={out}"]
    assert train(room / "my.toml", *keys, *places) == 0
    run("merge", out, tmp_path / "run", "-o", tmp_path / "again", "--no-verify")


def test_a_mean_has_by_default_the_format_of_its_first_input(room: Path, tmp_path: Path) -> None:
    run("merge", room / "hf", room / "native", "-o", tmp_path / "mean", "--no-verify")
    source = open_source(tmp_path / "mean")
    assert source.kind == "hf"
    assert {source.dtype(key) for key in source.shapes} == {torch.bfloat16}


def test_an_interrupted_merge_goes_on_only_with_the_same_inputs_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_folder(tmp_path / "a", "llama")
    second = moved(first, tmp_path / "b", seed=1)
    filled: list[int] = []
    fill = target.fill

    def interrupted(file: Path, start: int, values: Tensor) -> None:
        filled.append(start)
        if len(filled) == 12:
            raise KeyboardInterrupt
        fill(file, start, values)

    def merged(out: str, shares: str) -> int:
        words = ["merge", first, second, "-o", tmp_path / out, "--weights", shares, "--no-verify"]
        return main([*map(str, words)])

    monkeypatch.setattr(target, "fill", interrupted)
    assert merged("mean", "0.25,0.75") == 130
    assert not (tmp_path / "mean").exists()
    assert merged("mean", "0.25,0.75") == 0
    resumed = len(filled) - 12
    filled[:] = []
    monkeypatch.setattr(target, "fill", interrupted)
    assert merged("other", "0.5,0.5") == 130
    monkeypatch.setattr(target, "fill", fill)
    assert merged("other", "0.25,0.75") == 0
    assert merged("whole", "0.25,0.75") == 0
    whole = load_file(tmp_path / "whole/model.safetensors")
    assert resumed == len(whole) - 11
    for name in ("mean", "other"):
        made = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(made[key], whole[key]) for key in whole)


@pytest.mark.cases(0, sample=1)
@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("to", ["megaprec", "hf", "megatron"])
def test_memory_is_that_of_some_tensors_however_many_inputs(to: str, tmp_path: Path) -> None:
    """Four times 180 MB in tensors of at most 12 MB: beyond what importing takes, less than eight
    of the largest."""
    sizes: dict[str, Any] = {
        "hidden_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "head_dim": 128,
        "intermediate_size": 1920,
        "vocab_size": 3072,
    }
    large = write_folder(tmp_path / "large", "llama", **sizes)
    run("convert", large, tmp_path / "native", "--no-verify")
    run("convert", large, tmp_path / "megatron", "--to", "megatron", "--no-verify")
    small = write_folder(tmp_path / "small", "llama")
    program = (
        "import sys; from pathlib import Path; from tools.cli import main\n"
        "def kb(what): return "
        "int(Path('/proc/self/status').read_text().split(what)[1].split()[0])\n"
        "room, to = sys.argv[1:]\n"
        "def merge(out, *names): assert not main(['merge', *(f'{room}/{name}' for name in names), "
        "'-o', f'{room}/{out}', '--to', to, '--no-verify'])\n"
        # imports all that there is to import
        "merge('out', 'small', 'small')\n"
        "Path('/proc/self/clear_refs').write_text('5')\n"  # forgets the highest so far
        "before = kb('VmRSS:'); merge('out2', 'large', 'native', 'megatron', 'large')\n"
        "print('grew', kb('VmHWM:') - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), to],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    grew = int(done.stdout.split()[-1]) * 1024
    largest = 4 * 768 * 2 * 1920  # gate and up are one tensor in Megatron
    assert small.is_dir() and (large / "model.safetensors").stat().st_size > 13 * largest
    assert grew < 8 * largest
