"""`megaprec convert` end to end without other people's libraries: round trips, kills, bad input,
limits."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaprec.checkpoint.reader import Store
from megaprec.errors import Problem, UserError
from tests.other_systems import BACK_FROM_MEGATRON, FOR_MEGATRON, same_files, usually, write_folder
from tests.refusals import raises, sentence, shows
from tests.runs import checkpoint, edit_index, tensors, train, train_on, write_run
from tools.cli import main
from tools.commands.inspect import describe
from tools.convert.core import names, target, transforms
from tools.convert.core.target import convert
from tools.convert.formats import open_source
from tools.convert.hf.write import hf_target
from tools.convert.native import native_target
from tools.convert.verify import compare_logits


def run(*arguments: object) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def silent(moved: int, said: str) -> None: ...


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tp 2 x pp 2 ranks wrote, with a SentencePiece tokenizer."""
    file = write_run(tmp_path_factory.mktemp("runs"))
    return checkpoint(train_on(file, "train.steps=3", "model.dropout=0", tensor=2, pipeline=2), 3)


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("kind", usually(("gpt2", "deepseek_v3", "mixtral"), BACK_FROM_MEGATRON))
@pytest.mark.usefixtures("torch_files_read_here")
def test_weights_come_back_bit_for_bit_through_ours_and_megatron(kind: str, tmp_path: Path) -> None:
    hf = write_folder(tmp_path / "hf", kind, torch.bfloat16, **FOR_MEGATRON.get(kind, {}))
    run(hf, tmp_path / "ours")
    run(tmp_path / "ours", tmp_path / "megatron", "--to", "megatron", "--tp", 4, "--pp", 2)
    run(tmp_path / "megatron", tmp_path / "back", "--to", "hf")
    before = load_file(hf / "model.safetensors")
    after = load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype
        for name in before
    )


@pytest.mark.parametrize("ways", [["megatron"], ["megaprec", "megatron"], ["megatron", "megaprec"]])
@pytest.mark.usefixtures("torch_files_read_here")
def test_how_texts_are_generated_comes_back_through_every_format(
    ways: list[str], tmp_path: Path
) -> None:
    said = {
        "bos_token_id": 3,
        "eos_token_id": [5, 7],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
    }
    folder = write_folder(tmp_path / "hf", "llama")
    (folder / "generation_config.json").write_text(json.dumps(said))
    for number, to in enumerate([*ways, "hf"]):
        run(folder, tmp_path / f"{number}", "--to", to)
        folder = tmp_path / f"{number}"
    assert json.loads((folder / "generation_config.json").read_text()) == said


@pytest.mark.usefixtures("torch_files_read_here")
def test_a_megatron_folder_says_nothing_of_generation_that_its_source_did_not(
    tmp_path: Path,
) -> None:
    run(write_folder(tmp_path / "hf", "llama"), tmp_path / "megatron", "--to", "megatron")
    assert not [*(tmp_path / "megatron").rglob("generation_config.json")]


@pytest.mark.usefixtures("torch_files_read_here")
def test_a_damaged_word_on_generation_beside_megatrons_files_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "hf", "llama")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    run(folder, tmp_path / "megatron", "--to", "megatron")
    (file,) = (tmp_path / "megatron").rglob("generation_config.json")
    file.write_text("{")
    assert main(["convert", str(tmp_path / "megatron"), str(tmp_path / "back"), "--to", "hf"]) == 2
    assert shows(capsys.readouterr().err, "megaprec.file_unreadable", path=file)


def test_each_tensor_is_read_once_and_what_was_written_is_read_back(tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path / "hf", "gpt2"))
    convert(source, native_target(source, None), tmp_path / "ours", silent)
    assert set(source.loads.values()) == {1}
    assert len(source.loads) == len(load_file(tmp_path / "hf/model.safetensors"))


@pytest.mark.slow
def test_moments_masters_and_the_scaler_come_back_through_megatron(
    trained: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(trained, tmp_path / "trained")
    scaler = {"scale": 1024.0, "growth_tracker": 7, "hysteresis_tracker": 1}
    edit_index(moved, lambda index: index["optimizer"].update(scaler=scaler))
    run(moved, tmp_path / "megatron", "--to", "megatron", "--tp", 2, "--pp", 2, "--dtype", "bf16")
    run(tmp_path / "megatron", tmp_path / "ours")
    before = tensors(moved)
    after = tensors(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert {name.split("/")[0] for name in before} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(before[name], after[name]) for name in before)
    kept = Store(tmp_path / "ours").index
    assert kept["optimizer"] == Store(moved).index["optimizer"]
    assert kept["optimizer"]["scaler"] == scaler
    assert kept["progress"]["step"] == 3


@pytest.mark.usefixtures("torch_files_read_here")
def test_masters_without_half_weights_go_the_same_way(trained: Path, tmp_path: Path) -> None:
    run(trained, tmp_path / "megatron", "--to", "megatron", "--layers", "local")
    run(tmp_path / "megatron", tmp_path / "ours")
    before = tensors(trained)
    after = tensors(tmp_path / "ours")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_large_weights_are_written_in_shards_that_read_back(tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path / "hf", "llama"))
    convert(source, hf_target(source, None, shard_bytes=20_000), tmp_path / "shards", silent)
    files = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(files) > 3
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 20_000 for file in files)
    again = open_source(tmp_path / "shards")
    assert all(torch.equal(again.read(key), source.read(key)) for key in source.shapes)


TARGETS: dict[str, list[object]] = {
    "hf": ["--to", "hf"],
    "megaprec": ["--to", "megaprec"],
    "megatron": ["--to", "megatron", "--tp", 2, "--pp", 2],
}


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.usefixtures("torch_files_read_here")
def test_a_conversion_that_was_killed_goes_on_and_leaves_the_same_bytes(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = write_folder(tmp_path / "hf", "llama")
    run(hf, tmp_path / "whole/model", *TARGETS[to])
    written: list[str] = []
    write = target._write

    def counted(one: target.Write, *rest: object) -> dict[str, str]:
        written.append(one.name)
        return write(one, *rest)  # type: ignore[arg-type]

    def kill(one: target.Write, *rest: object) -> dict[str, str]:
        if len(written) == 11:
            os.kill(os.getpid(), signal.SIGKILL)  # half of what it was about to do is done
        return counted(one, *rest)

    monkeypatch.setattr(target, "_write", kill)
    if (child := os.fork()) == 0:
        run(hf, tmp_path / "killed/model", *TARGETS[to])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [p.name for p in (tmp_path / "killed").iterdir()] == [".model.partial"]
    monkeypatch.setattr(target, "_write", counted)
    run(hf, tmp_path / "killed/model", *TARGETS[to])
    same_files(tmp_path / "whole/model", tmp_path / "killed/model")
    lines = 1 + len(written)
    monkeypatch.undo()
    run(hf, tmp_path / "again", *TARGETS[to])
    assert lines == len(written) + 1 and len(written) < len(open_source(tmp_path / "again").shapes)


def test_a_source_that_changed_in_between_is_converted_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = write_folder(tmp_path / "hf", "llama")
    monkeypatch.setattr(target, "_compare", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["convert", str(hf), str(tmp_path / "ours")]) == 130
    monkeypatch.undo()
    changed = {name: values + 1 for name, values in load_file(hf / "model.safetensors").items()}
    save_file(changed, hf / "model.safetensors")
    run(hf, tmp_path / "ours")
    assert torch.equal(
        Store(tmp_path / "ours").read("weight", "final_norm.weight"), changed["model.norm.weight"]
    )


def test_values_that_do_not_read_back_are_not_taken_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = write_folder(tmp_path / "hf", "llama")
    # a disk that loses what it is given
    monkeypatch.setattr(target, "fill", lambda file, start, values: None)
    assert main(["convert", str(hf), str(tmp_path / "ours")]) == 2
    assert shows(capsys.readouterr().err, "convert.read_back_differs")
    assert not (tmp_path / "ours").exists()


@pytest.mark.usefixtures("torch_files_read_here")
def test_a_wrong_order_of_query_key_and_value_is_found_by_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written packed where Megatron groups: the shapes agree, and so do sums and norms."""
    hf = write_folder(tmp_path / "hf", "llama")
    run(hf, tmp_path / "ours")
    monkeypatch.setattr(names, "GROUPED", transforms.PACKED)
    # reads back as it was written, all the same
    run(tmp_path / "ours", tmp_path / "megatron", "--to", "megatron")
    monkeypatch.undo()
    with raises("convert.verify_differs"):
        compare_logits(tmp_path / "ours", tmp_path / "megatron")


def test_a_checkpoint_made_of_a_folder_generates_and_describes_itself(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(trained, tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "ours")
    capsys.readouterr()
    said = []
    for path in (trained, tmp_path / "ours"):
        assert (
            main(
                [
                    "generate",
                    str(path),
                    "--prompt",
                    "the model",
                    "--tokens",
                    "8",
                    "--temperature",
                    "0",
                ]
            )
            == 0
        )
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "3 steps" in describe(open_source(trained))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop(file: Path, name: str) -> None:
    save_file({n: t for n, t in load_file(file).items() if n != name}, file)


def cut(file: Path, to: int) -> None:
    file.write_bytes(file.read_bytes()[:to])


def sharded(folder: Path, file: str) -> None:
    """Leave an index of shards alone in the folder, which names a file."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))


NORM = "model.norm.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing tensor": (lambda f: drop(f / "model.safetensors", NORM), sentence("convert.tensor_missing", name=NORM, shape=[24])),
    "surplus tensor": (lambda f: edit(f / "config.json", num_hidden_layers=3), sentence("convert.tensor_surplus", name=re.compile(r"^model\.layers\.3\."))),
    "other shape": (lambda f: edit(f / "config.json", intermediate_size=41), sentence("convert.tensor_shape", shape=[40, 24], expected_shape=re.compile(r"^\[41"))),
    "unknown model": (lambda f: edit(f / "config.json", model_type="bert"), sentence("convert.hf_model_type", kind="bert")),
    "truncated weights": (lambda f: cut(f / "model.safetensors", 9000), sentence("convert.not_safetensors")),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), sentence("convert.hf_no_weights")),
    "broken header": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100), sentence("convert.not_safetensors")),
    "no json": (lambda f: (f / "config.json").write_text("{"), sentence("megaprec.file_unreadable", path=re.compile(r"config\.json$"))),
    "a missing shard": (
        lambda f: sharded(f, "model-1.safetensors"), sentence("convert.shard_missing", path=re.compile(r"/model-1\.safetensors$")),
    ),
    "a shard elsewhere": (
        lambda f: sharded(f, "../x.safetensors"),
        sentence("convert.hf_weight_map"),
    ),
    "one file and shards": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}'),
        sentence("convert.two_stores", single="model.safetensors", index="model.safetensors.index.json"),
    ),
    "tied, yet different": (
        lambda f: edit(f / "config.json", tie_word_embeddings=True),
        sentence(
            "convert.hf_tied_differs", head="lm_head.weight", embedding="model.embed_tokens.weight"
        ),
    ),
    "unknown format": (lambda f: (f / "config.json").unlink(), sentence("convert.format_unknown")),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_folder_is_refused_in_a_line_and_leaves_nothing(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, said = BAD[fault]
    folder = write_folder(tmp_path / "hf", "llama")
    spoil(folder)
    before = sorted(tmp_path.rglob("*"))
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 2
    captured = capsys.readouterr()
    assert re.search(said, captured.err) and "Traceback" not in captured.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "hf", "llama")
    shutil.copy(trained / "text.model", folder / "tokenizer.model")
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 2
    assert shows(
        capsys.readouterr().err, "convert.tokenizer_beyond_vocabulary", vocab_size=330, vocab=131
    )


def test_a_destination_that_is_there_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "hf", "llama")
    assert main(["convert", str(folder), str(folder)]) == 2
    assert shows(capsys.readouterr().err, "command.folder_exists")


def test_a_layout_that_megatron_does_not_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "hf", "llama")
    assert main(["convert", str(folder), str(tmp_path / "m"), "--to", "megatron", "--pp", "3"]) == 2
    assert shows(capsys.readouterr().err, "convert.target_stages", layers=4)
    assert main(["convert", str(folder), str(tmp_path / "m"), "--to", "megatron", "--tp", "7"]) == 2
    assert shows(capsys.readouterr().err, "convert.target_heads", tp=7)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path: Path) -> None:
    hf = write_folder(tmp_path / "hf", "llama")
    program = (
        "import resource, sys; from tools.cli import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000)); sys.exit(main(sys.argv[1:]))"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "convert",
        str(hf),
        str(tmp_path / "ours"),
        "--no-verify",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 2
    remedy = "raise the limit of a file's size"
    fields = {"destination": tmp_path / "ours", "remedy": remedy}
    assert shows(done.stderr.splitlines()[-1], "convert.disk_told", **fields)
    assert not (tmp_path / "ours").exists()
    run(hf, tmp_path / "ours")


def test_too_little_room_is_known_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = write_folder(tmp_path / "hf", "llama")
    monkeypatch.setattr(
        target.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 100)
    )  # type: ignore[attr-defined]
    assert main(["convert", str(hf), str(tmp_path / "ours")]) == 2
    assert shows(capsys.readouterr().err, "convert.no_room", free=100)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.cases(0, sample=1)
@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("to", TARGETS)
def test_memory_is_that_of_some_tensors_not_of_the_model(to: str, tmp_path: Path) -> None:
    """180 MB in tensors of at most 12 MB: beyond what importing takes, less than six of the
    largest."""
    sizes: dict[str, Any] = {
        "hidden_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "head_dim": 128,
    }
    hf = write_folder(tmp_path / "hf", "llama", intermediate_size=1920, vocab_size=3072, **sizes)
    program = (
        "import sys; from pathlib import Path; from tools.cli import main\n"
        "def kb(what): return "
        "int(Path('/proc/self/status').read_text().split(what)[1].split()[0])\n"
        # imports all that there is to import
        "main(['convert', sys.argv[1], sys.argv[2], *sys.argv[4:]])\n"
        "Path('/proc/self/clear_refs').write_text('5')\n"  # forgets the highest so far
        "before = kb('VmRSS:'); main(['convert', sys.argv[3], sys.argv[2] + '2', *sys.argv[4:]])\n"
        "print('grew', kb('VmHWM:') - before)"
    )
    small = write_folder(tmp_path / "small", "llama")
    command = [
        sys.executable,
        "-c",
        program,
        str(small),
        str(tmp_path / "out"),
        str(hf),
        *map(str, TARGETS[to]),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )
    grew = int(done.stdout.split()[-1]) * 1024
    largest = 4 * 768 * (2 * 1920 if to == "megatron" else 3072)  # gate and up are one tensor there
    assert (hf / "model.safetensors").stat().st_size > 13 * largest
    assert grew < 6 * largest


@pytest.mark.slow
def test_a_checkpoint_with_fp8_histories_is_read_without_them_which_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    fp8 = ("fp8.kind=delayed", "fp8.pad=true", "precision.compute=bf16", "model.dropout=0")
    assert train(file, "train.steps=1", *fp8) == 0
    saved = checkpoint(tmp_path / "run", 1)
    assert any(key.startswith("fp8/") for key in tensors(saved))
    capsys.readouterr()
    run(saved, tmp_path / "hf", "--no-verify")
    assert "not read: FP8 scales and amax histories" in capsys.readouterr().out
    run(saved, tmp_path / "ours", "--to", "megaprec", "--no-verify")
    kept = tensors(tmp_path / "ours")
    assert all(
        torch.equal(kept[key], value)
        for key, value in tensors(saved).items()
        if not key.startswith("fp8/")
    )
    assert (
        train(
            file, "train.steps=2", *fp8, f"train.init_from={saved}", f"train.folder={tmp_path}/next"
        )
        == 0
    )


def test_a_chat_template_that_is_not_carried_over_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "hf", "llama")
    for there in (False, True):
        if there:
            (folder / "chat_template.json").write_text("{}")
        run(folder, tmp_path / f"{there}")
        assert ("chat_template.json is not carried over" in capsys.readouterr().out) is there


@pytest.mark.parametrize("fails", ["finish", "reopen"])
def test_a_conversion_that_is_refused_leaves_nothing(
    fails: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("no")

    wrong = replace(hf_target(open_source(trained), None), **{fails: refuse})
    with pytest.raises(UserError, match="no"):
        convert(open_source(trained), wrong, tmp_path / "hf", silent)
    assert not [*tmp_path.iterdir()]


def test_a_tokenizer_that_cannot_be_written_is_refused_before_anything_is(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["convert", str(trained), str(tmp_path / "hf"), "--no-verify"]) == 2
    assert (
        capsys.readouterr().err
        == f"{Problem.of('data.tokenizers_missing', path='tokenizer.json')}\n"
    )
    assert not [*tmp_path.iterdir()]
