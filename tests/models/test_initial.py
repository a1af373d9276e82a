"""What a run can begin with or go on from: folders, checkpoints of other layouts, converted
ones."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from megaprec.checkpoint.atomic import checkpoint_path
from megaprec.text.training import train_hugging_face
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from parallel import layers
from parallel.pipeline.kinds import schedule
from tests.other_systems import slow, write_folder
from tests.refusals import raises, shows
from tests.runs import checkpoint, rewind, steps, tensors, train, train_on, write_run
from tools.cli import main
from tools.config.resolved_run import resolve_run
from tools.training.corpus import open_corpus
from tools.training.trainer import Trainer


def convert(*arguments: object) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose run has been trained by tp 2 x pp 2 ranks, without dropout."""
    file = write_run(tmp_path_factory.mktemp("initial"))
    file.write_text(file.read_text().replace("dropout = 0.1", "dropout = 0.0"))
    train_on(file, tensor=2, pipeline=2)
    return file


def begun(file: Path, init: Path, name: str, **layout: int) -> Path:
    """A run of two steps that begins with `init`, with no [model] of its own."""
    text = file.read_text()
    own = file.with_name(f"{name}.toml")
    own.write_text(text[text.index("[data]") :])
    place = own.with_suffix("")
    keys = [
        f"train.init_from={init}",
        f"train.folder={place}",
        f"data.cache={place}/data",
        "train.steps=2",
    ]
    open_corpus(resolve_run(own, keys))
    return train_on(own, *keys, **layout)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_run_begins_with_the_weights_of_a_checkpoint_of_any_origin_and_layout(
    file: Path, tmp_path: Path
) -> None:
    """A run directory, the folders exported from it, and a checkpoint made of one are the same
    beginning."""
    run = file.parent / "run"
    convert(run, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "converted")
    convert(run, tmp_path / "megatron", "--to", "megatron", "--tp", 2)
    shutil.copytree(checkpoint(run, 6), tmp_path / "copy")
    expected = steps(begun(file, tmp_path / "hf", "from_hf"))
    assert steps(begun(file, run, "from_run")) == expected
    assert steps(begun(file, tmp_path / "converted", "from_converted")) == expected
    assert steps(begun(file, tmp_path / "megatron", "from_megatron")) == expected
    for step, other in zip(
        expected, steps(begun(file, tmp_path / "copy", "tensor", tensor=2, data=2)), strict=True
    ):
        assert step["loss"] == pytest.approx(other["loss"], rel=1e-6)
    last = steps(run)[-1]["loss"]
    assert expected[0]["loss"] < (steps(run)[0]["loss"] + last) / 2, (
        "it did not begin with trained weights"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("torch_files_read_here")
def test_the_command_begins_with_the_weights_of_a_format_that_has_no_config_json(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is compared with transformers is a config.json, which Megatron's folders lack."""
    convert(file.parent / "run", tmp_path / "megatron", "--to", "megatron", "--no-verify")
    keys = [f"train.init_from={tmp_path}/megatron", f"train.folder={tmp_path}/run", "train.steps=1"]
    assert train(file, *keys) == 0
    assert f"weights    from {tmp_path}/megatron" in capsys.readouterr().out


def test_a_run_that_begins_with_a_folder_tells_its_notes(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(file.parent / "run", tmp_path / "hf", "--no-verify")
    (tmp_path / "hf/model.fp16.safetensors").touch()
    keys = [f"train.init_from={tmp_path}/hf", f"train.folder={tmp_path}/run", "train.steps=1"]
    keys += [f"data.cache={tmp_path}/data"]
    assert main(["train", str(file), *keys, "--no-verify"]) == 0
    assert f"note: {tmp_path}/hf: model.fp16.safetensors is not read" in capsys.readouterr().out


def test_the_model_and_the_tokenizer_come_from_the_checkpoint(file: Path) -> None:
    found = checkpoint(file.parent / "run", 6)
    bare = file.with_name("bare.toml")
    bare.write_text(
        "[train]\nsteps = 1\nglobal_batch = 1\nmicro_batch = 1\nseq_length = "
        "8\n[data]\nsource = 'x'\n"
    )
    config = resolve_run(bare, [f"train.init_from={found}"])
    assert (config.model.layers, config.model.ffn, config.model.vocab) == (2, 32, 330)
    assert config.origin("model.ffn") == str(found / "checkpoint.json")
    assert Path(config.data.tokenizer) == found / "text.model"
    with raises("config.not_of_weights", key="model.ffn", value=40, value_of_weights=32):
        resolve_run(bare, [f"train.init_from={found}", "model.ffn=40"])


@pytest.mark.parametrize(
    "key",
    [
        "ffn=44",
        "heads=16",
        "layers=3",
        "experts=2",
        'hybrid_pattern="M"',
        "latent={kv_rank=8, rope_dim=2, nope_dim=2, value_dim=2}",
    ],
)
def test_a_key_that_contradicts_the_weights_is_one_line_and_no_other_follows(
    key: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "weights", "llama")
    name, _, _ = key.partition("=")
    needed = ["train.steps=1", "train.global_batch=1", "train.micro_batch=1", "data.source=x"]
    needed += ["train.seq_length=8", "data.vocab_size=131"]
    resolve_run(None, [f"train.init_from={folder}", *needed])
    with raises("config.not_of_weights", key=f"model.{name}") as caught:
        resolve_run(None, [f"train.init_from={folder}", *needed, f"model.{key}"])
    assert len(caught.value.problems) == 1


def test_a_vocabulary_that_is_left_open_is_that_of_the_weights_which_may_be_padded(
    file: Path, tmp_path: Path
) -> None:
    padded = checkpoint(
        train_on(file, "model.vocab=400", f"train.folder={tmp_path}/padded", "train.steps=1"), 1
    )
    keys = [f"train.init_from={padded}", f"train.folder={tmp_path}/run", "train.steps=1"]
    assert (
        resolve_run(file, keys).model.vocab
        == resolve_run(file, [*keys, "model.vocab=0"]).model.vocab
        == 400
    )
    assert train(file, *keys, "model.vocab=0") == 0


@pytest.mark.slow
def test_another_tokenizer_than_that_of_the_weights_is_refused_unless_allowed_and_then_kept(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    initial = checkpoint(file.parent / "run", 6)
    shutil.copy(initial / "text.model", tmp_path / "same.model")
    other = train_hugging_face(
        [(file.parent / "text.txt").read_text("utf-8")], tmp_path / "tokenizer.json", 300
    )
    convert(initial, tmp_path / "hf")
    exported = tmp_path / "hf" / "tokenizer.json"

    def trained(tokenizer: Path, name: str, *more: str) -> int:
        keys = [f"data.tokenizer={tokenizer}", f"train.init_from={initial}", "train.steps=1"]
        return train(
            file,
            *keys,
            f"train.folder={tmp_path}/{name}",
            f"data.cache={tmp_path}/{name}/data",
            *more,
        )

    assert trained(tmp_path / "same.model", "same") == 0
    assert trained(exported, "exported") == 0, "the same tokens in another form"
    capsys.readouterr()
    assert trained(other, "other") == 2
    said = capsys.readouterr().err
    assert shows(said, "training.tokenizer_of_weights", tokenizer=other)
    assert shows(said, "training.tokenizer_of_weights", value=re.compile(re.escape(str(initial))))
    assert not (tmp_path / "other" / "checkpoints").exists()
    assert trained(other, "other", "--allow=tokenizer") == 0
    assert "not needed" not in capsys.readouterr().out
    kept = checkpoint(tmp_path / "other", 1)
    assert (kept / other.name).read_bytes() == other.read_bytes()
    assert trained(other, "other", "train.steps=2") == 0, (
        "a resume goes on with the tokenizer of the checkpoint"
    )


def test_a_data_set_of_another_tokenizer_than_that_of_the_weights_is_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    initial = checkpoint(file.parent / "run", 6)
    source = file.parent / "text.txt"
    source.with_name("other.txt").write_text(source.read_text("utf-8") * 2 + "xyz" * 99, "utf-8")
    built = [
        "data",
        "build",
        str(source.with_name("other.txt")),
        str(tmp_path / "tokens"),
        "--vocab-size",
        "330",
    ]
    assert main(built) == 0
    keys = [
        f"train.init_from={initial}",
        f"data.source={tmp_path}/tokens",
        f"train.folder={tmp_path}/run",
    ]
    capsys.readouterr()
    assert train(file, *keys, "train.steps=1") == 2
    assert shows(
        capsys.readouterr().err,
        "training.tokenizer_of_set",
        tokenizer=initial / "text.model",
        built_by=f"{tmp_path}/tokens, {tmp_path}/tokens.model",
    )
    assert train(file, *keys, "train.steps=1", "--allow=tokenizer") == 0


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("key", ["data.source", "data.validation"])
def test_a_data_set_that_another_given_tokenizer_has_built_is_refused_and_one_of_the_same_tokens_is_not(
    key: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer has as many tokens, of which two are exchanged. No copy of it lies beside the
    data set."""
    initial = checkpoint(file.parent / "run", 6)
    convert(initial, tmp_path / "hf")
    content = json.loads((tmp_path / "hf/tokenizer.json").read_text("utf-8"))
    (tmp_path / "same.json").write_text(json.dumps(content, indent=7), "utf-8")
    ids = content["model"]["vocab"]
    letter = "a"
    other_letter = "e"
    ids[letter], ids[other_letter] = ids[other_letter], ids[letter]
    (tmp_path / "exchanged.json").write_text(json.dumps(content), "utf-8")

    def trained(built_with: str, *more: str) -> int:
        prefix = tmp_path / "tokens" / built_with
        tokenizer = f"--tokenizer={tmp_path}/{built_with}.json"
        assert (
            main(
                ["data", "build", f"{file.parent}/text.txt", str(prefix), tokenizer, "--overwrite"]
            )
            == 0
        )
        sets = f'data.validation=[{{name="tokens", source="{prefix}"}}]'
        data = f"data.source={prefix}" if key == "data.source" else sets
        own = [
            f"train.folder={tmp_path}/run-{built_with}",
            f"data.cache={tmp_path}/cache-{built_with}",
        ]
        keys = [f"train.init_from={tmp_path}/hf", data, *own]
        capsys.readouterr()
        return train(file, *keys, "train.steps=1", "train.eval_every=1", *more)

    assert trained("exchanged") == 2
    said = capsys.readouterr().err
    assert shows(
        said,
        "training.tokenizer_of_set",
        tokenizer=re.compile(r"/hf/tokenizer\.json"),
        built_by=re.compile(re.escape(str(tmp_path))),
    )
    assert shows(said, "training.tokenizer_of_set", tokenizer=re.compile(re.escape(str(tmp_path))))
    assert trained("exchanged", "--allow=tokenizer") == 0
    assert trained("same") == 0
    assert "must mean the same" not in capsys.readouterr().out


def test_a_tokenizer_of_more_tokens_than_the_weights_have_names_a_way_out_that_works(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    initial = checkpoint(file.parent / "run", 6)
    text = (file.parent / "text.txt").read_text("utf-8")
    large = train_hugging_face([text], tmp_path / "tokenizer.json", 340)
    keys = [f"train.init_from={initial}", f"train.folder={tmp_path}/run", "train.steps=1"]
    assert train(file, *keys, f"data.tokenizer={large}") == 2
    said = capsys.readouterr().err
    assert shows(said, "training.vocabulary_of_weights") and "model.vocab" not in said
    assert train(file, *keys) == 0


def test_a_run_does_not_go_on_from_weights_alone_and_says_what_to_do(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(file.parent / "run", tmp_path / "hf")
    alone = checkpoint_path(tmp_path / "run/checkpoints", 6)
    convert(tmp_path / "hf", alone)
    before = sorted(tmp_path.rglob("*"))
    assert train(file, f"train.folder={tmp_path}/run") == 2
    said = capsys.readouterr().err
    assert shows(said, "training.missing_state", path=alone, missing="exp_avg and no exp_avg_sq")
    assert f'train.init_from = "{alone}"' in said and "damaged" not in said
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("dtype", ["bf16", *slow(("fp32",))])
@pytest.mark.usefixtures("torch_files_read_here")
def test_a_run_that_went_through_megatrons_files_goes_on_as_if_it_had_not(
    dtype: str, file: Path, tmp_path: Path
) -> None:
    """Masters, moments, step count and how much of the data was seen: the steps are the same, bit
    for bit."""
    run = file.parent / "run"
    stopped = rewind(run, tmp_path / "stopped", 3)
    convert(
        checkpoint(stopped, 3),
        tmp_path / "megatron",
        "--to",
        "megatron",
        "--tp",
        2,
        "--dtype",
        dtype,
    )
    moved = checkpoint_path(tmp_path / "moved/checkpoints", 3)
    convert(tmp_path / "megatron", moved)
    shutil.copy(file.parent / "run/checkpoints/step_00000003/text.model", moved)
    shutil.copy(stopped / "metrics.jsonl", tmp_path / "moved/metrics.jsonl")
    # a checkpoint of Megatron does not say which part was held out
    given = (f"train.folder={tmp_path}/moved", "data.held_out_from=everywhere")
    train_on(file, *given, tensor=2, pipeline=2)
    assert steps(tmp_path / "moved")[3:] == steps(run)[3:]
    before, after = (tensors(checkpoint(folder, 6)) for folder in (run, tmp_path / "moved"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_of_no_format_is_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with raises("convert.format_unknown"):
        resolve_run(file, [f"train.init_from={tmp_path}/empty"])


def test_no_initial_weight_is_drawn_for_a_run_that_loads_others(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are loaded, all weights are NaN: one that nothing loads would be seen in the
    first loss."""
    stopped = rewind(file.parent / "run", tmp_path / "stopped", 3)
    config = resolve_run(file, [f"train.folder={stopped}"])
    monkeypatch.setattr(layers, "normal_part", lambda *arguments: pytest.fail("a weight was drawn"))
    trainer = Trainer(config, open_corpus(config), None, checkpoint(stopped, 3))
    assert all(
        p.isfinite().all() for stage in trainer.engine.stages.values() for p in stage.parameters()
    )
    model = config.model.with_vocab(330)
    one = schedule("1f1b", 1, 1)
    blank = Engine.build(
        model, config.plan, None, one, EngineOptions(micro_batch=1, seq_length=8, blank=True)
    )
    assert all(p.isnan().all() for stage in blank.stages.values() for p in stage.parameters())
