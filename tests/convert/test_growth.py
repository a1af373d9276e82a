"""Weights get rows for new tokens: the same in every layout, to the bit, and all other rows are as
they were."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import layout_of
from megaprec.text.tokenizer import Tokenizer
from models.decoder.stages import Stage
from tests.published import BOS, folder_of, logits_of, model_of, tokenizers, transformers, written
from tests.ranks import run_ranks
from tests.refusals import shows
from tests.runs import checkpoint, steps, tensors, train, train_each_on, train_on
from tools.cli import main
from tools.config.resolved_run import resolve_run
from tools.convert.formats import open_source
from tools.convert.growth import VocabularyGrowth, moved_tokens
from tools.inference.load import load_model
from tools.journal.records import INITIAL, read_events
from tools.training.corpus import open_corpus

OLD = 300  # tokens of the published model
ADDED = ["<call>", "<result>", "über Öl"]
KINDS = ("mean", "zero", "random")
TABLES = ("weight/embedding.weight", "weight/head.weight")


def with_tokens(folder: Path, place: Path, tokens: list[str]) -> Path:
    """The tokenizer of a folder with more tokens; returns its file."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(tokens)
    tokenizer.save_pretrained(place)
    return place / "tokenizer.json"


class Published:
    """A published model, its tokenizer with more tokens, and a run file that begins with it."""

    def __init__(self, name: str, place: Path) -> None:
        self.place = place
        self.folder = folder_of(name, place / "hf")
        self.tokenizer = with_tokens(self.folder, place / "tokens", ADDED)
        self.file = written(place, self.folder)
        self.weights = {
            key: open_source(self.folder).read(key)
            for key in TABLES
            if key in open_source(self.folder).shapes
        }

    def keys(self, run: str, kind: str, *more: str) -> list[str]:
        """The keys of a run whose vocabulary grows; its data are shared by all."""
        return [
            f"train.folder={self.place}/{run}",
            f"data.cache={self.place}/grown",
            f"data.tokenizer={self.tokenizer}",
            f"train.grow_vocabulary={kind}",
            "train.micro_batch=1",
            "lr.peak=1e-300",  # no row moves, not even one of zeros
            *more,
        ]

    def tables(self, run: str) -> dict[str, Tensor]:
        found = tensors(checkpoint(self.place / run, 1))
        return {key: found[key] for key in self.weights}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published("llama", tmp_path_factory.mktemp("grown"))


@pytest.fixture(scope="module")
def grown(llama: Published) -> dict[str, dict[str, Tensor]]:
    """Embedding and head after a step without learning on one rank, by the kind of their new
    rows."""
    for kind in KINDS:
        assert train(llama.file, *llama.keys(kind, kind), "--no-verify") == 0
    return {kind: llama.tables(kind) for kind in KINDS}


@pytest.mark.slow
def test_old_rows_stay_and_new_ones_are_what_the_key_says(
    llama: Published, grown: dict[str, dict[str, Tensor]]
) -> None:
    rows = OLD + len(ADDED)
    for key, before in llama.weights.items():
        for kind in KINDS:
            after = grown[kind][key]
            assert after.shape == (rows, before.shape[1])
            assert torch.equal(after[:OLD], before), (kind, key)
        mean = before.double().mean(0).float().expand(len(ADDED), -1)
        torch.testing.assert_close(grown["mean"][key][OLD:], mean, rtol=1e-6, atol=0)
        assert not grown["zero"][key][OLD:].any()
        drawn = grown["random"][key][OLD:]
        assert 0.01 < drawn.std() < 0.03, "model.init_std is 0.02"
    embedding, head = (grown["random"][key][OLD:] for key in TABLES)
    assert not torch.equal(embedding, head)


def test_random_rows_are_those_of_a_fresh_model_of_this_size(
    llama: Published, grown: dict[str, dict[str, Tensor]]
) -> None:
    run = llama.place / "fresh"
    lines = (llama.place / "random/run.toml").read_text()
    fresh = llama.place / "fresh.toml"
    fresh.write_text(lines.replace(f'init_from = "{llama.folder}"', 'init_from = ""'))
    keys = [f"train.folder={run}", f"data.cache={llama.place}/grown"]
    assert train(fresh, *keys, "train.grow_vocabulary=none") == 0
    drawn = llama.tables("fresh")
    for key in TABLES:
        assert torch.equal(grown["random"][key][OLD:], drawn[key][OLD:]), key


@pytest.mark.slow
def test_tensor_parallel_ranks_make_the_same_bits(
    llama: Published, grown: dict[str, dict[str, Tensor]]
) -> None:
    train_each_on(llama.file, [llama.keys(f"tp-{kind}", kind) for kind in KINDS], tensor=2)
    for kind in KINDS:
        for key, values in llama.tables(f"tp-{kind}").items():
            assert torch.equal(values, grown[kind][key]), (kind, key)


@pytest.mark.cases(0, sample=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_layout_makes_the_same_bits_and_a_tied_head_too(
    name: str, kind: str, tmp_path: Path
) -> None:
    model = Published(name, tmp_path)
    assert ("weight/head.weight" in model.weights) == (name == "llama")
    assert train(model.file, *model.keys("one", kind), "--no-verify") == 0
    for layout in ({"pipeline": 2}, {"data": 2}, {"tensor": 2, "pipeline": 2}):
        run = "-".join(f"{axis}{size}" for axis, size in layout.items())
        train_on(model.file, *model.keys(run, kind), **layout)
        for key, values in model.tables(run).items():
            assert torch.equal(values, model.tables("one")[key]), (layout, key)


def test_transformers_reads_the_export_and_computes_the_logits_of_old_tokens_as_before(
    llama: Published, grown: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    export = tmp_path / "export"
    assert main(["convert", str(llama.place / "mean"), str(export)]) == 0
    exported = model_of(export)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    assert exported.config.vocab_size == len(tokenizer) == OLD + len(ADDED)
    assert tokenizer.encode("<call>", add_special_tokens=False) == [OLD]
    # of texts without the new tokens
    batch = open_corpus(resolve_run(llama.file)).train.batch(0, 4)
    before = logits_of(model_of(llama.folder), batch)
    after = logits_of(exported, batch)
    torch.testing.assert_close(after[:, :OLD], before, rtol=0, atol=1e-14)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(llama.folder)
    theirs.resize_token_embeddings(OLD + len(ADDED))
    for key, values in zip(
        TABLES, (theirs.model.embed_tokens.weight, theirs.lm_head.weight), strict=True
    ):
        assert torch.equal(grown["mean"][key][:OLD], values[:OLD])
        # they draw around the mean
        torch.testing.assert_close(grown["mean"][key][OLD:], values[OLD:], rtol=0, atol=1e-3)


@torch.no_grad()
def computed_on_rank(mesh: DeviceMesh, folder: Path, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the head reads, and the logits of this rank's tokens, [samples, length, tokens]."""
    stage = load_model(folder, Stage, "fp64", mesh=mesh).stage
    read = list[Any]()
    stage.final_norm.register_forward_hook(lambda _, __, output: read.append(output))
    (part,) = layout_of(stage.head).parts
    logits = stage(ids.t()).transpose(0, 1)
    return read[0].transpose(0, 1), logits[..., : part.local[0]]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("tensor", [1, 2])
def test_what_the_head_reads_has_the_same_bits_as_before_in_a_layout_and_logits_differ_in_the_last_one(
    tensor: int, llama: Published, grown: dict[str, dict[str, Tensor]]
) -> None:
    """A kernel may add the terms of a product in another order when columns stand elsewhere."""
    assert grown
    ids = torch.as_tensor(open_corpus(resolve_run(llama.file)).train.batch(0, 4).tokens)
    found = list[tuple[Tensor, Tensor]]()
    for folder in (llama.folder, llama.place / "random"):
        ranks = run_ranks(computed_on_rank, {"tp": tensor}, folder=folder, ids=ids)
        found.append((ranks[0][0], torch.cat([logits for _, logits in ranks], -1)))
    (before, old_logits), (after, logits) = found
    assert torch.equal(before, after)
    assert logits.shape[-1] == OLD + len(ADDED)
    torch.testing.assert_close(logits[..., :OLD], old_logits, rtol=0, atol=1e-14)


@pytest.mark.slow
def test_a_run_that_has_grown_resumes_as_it_is_and_says_what_it_did(
    llama: Published, grown: dict[str, dict[str, Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert grown
    (event,) = read_events(llama.place / "mean", INITIAL)
    assert event["changed"] == [
        f"model.vocab: {OLD} -> {OLD + len(ADDED)}: 3 rows for new tokens (ids 300 to 302): the "
        "mean of the rows of 300 known tokens"
    ]
    straight = llama.keys("straight", "mean", "train.steps=2", "lr.peak=1e-3")
    assert train(llama.file, *straight, "checkpoint.every=1", "--no-verify") == 0
    assert (
        train(llama.file, *straight[1:], f"train.folder={llama.place}/twice", "train.steps=1") == 0
    )
    capsys.readouterr()
    assert train(llama.file, *straight[1:], f"train.folder={llama.place}/twice") == 0
    assert "rows for new tokens" not in capsys.readouterr().out
    assert steps(llama.place / "twice")[1:] == steps(llama.place / "straight")[1:]
    ours = tensors(checkpoint(llama.place / "twice", 2))
    theirs = tensors(checkpoint(llama.place / "straight", 2))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def refused(capsys: pytest.CaptureFixture[str], file: Path, *keys: str) -> str:
    capsys.readouterr()
    assert train(file, *keys, "--no-verify") == 2
    return capsys.readouterr().err


def test_what_does_not_grow_is_refused_by_name(
    llama: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = llama.keys("refused", "mean")
    own = f"data.tokenizer={llama.folder}/tokenizer.json"
    said = refused(capsys, llama.file, *keys, own)
    assert shows(said, "training.no_growth", kind="mean", vocab=OLD)
    said = refused(capsys, llama.file, *keys, "model.vocab=299")
    assert shows(said, "config.vocabulary_shrinks", vocab=299, rows=OLD)
    said = refused(capsys, llama.file, *keys, "model.vocab=301")
    assert shows(said, "training.vocabulary_below_tokenizer", size=301, tokens=OLD + 3)
    said = refused(capsys, llama.file, *keys, "train.grow_vocabulary=none")
    assert shows(said, "training.vocabulary_of_weights", tokens=OLD + 3, size=OLD)
    assert 'train.grow_vocabulary = "mean"' in said
    assert not (llama.place / "refused").exists()

    # a tokenizer with the same tokens, two of which have changed their ids
    made = tokenizers.Tokenizer.from_file(str(llama.tokenizer))
    text = made.to_str().replace('"<pad>"', '"<x>"').replace('"<eos>"', '"<pad>"')
    (tmp_path / "tokenizer.json").write_text(text.replace('"<x>"', '"<eos>"'))
    moved = f"data.tokenizer={tmp_path}/tokenizer.json"
    said = refused(capsys, llama.file, *keys, moved)
    assert shows(said, "training.tokens_moved", count=2, id=0, token="'<pad>'", now="token 1")
    accepted = [*keys, moved, f"data.cache={tmp_path}/data", f"train.folder={tmp_path}/run"]
    assert train(llama.file, *accepted, "--allow=tokenizer", "--no-verify") == 0
    assert "not needed" not in capsys.readouterr().out


def test_a_vocabulary_that_is_given_grows_without_a_tokenizer_and_says_what_was_not_checked(
    llama: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    model = transformers.AutoModelForCausalLM.from_pretrained(llama.folder)
    model.save_pretrained(bare)
    keys = llama.keys("padded", "zero", "model.vocab=320")
    assert train(llama.file, *keys, f"train.init_from={bare}", "--no-verify") == 0
    out = capsys.readouterr().out
    assert "note       train.grow_vocabulary: the tokenizer of the weights is not known" in out
    assert "model.vocab: 300 -> 320: 20 rows for new tokens (ids 300 to 319): zero" in out
    padded = llama.tables("padded")
    for key, before in llama.weights.items():
        assert torch.equal(padded[key][:OLD], before) and not padded[key][OLD:].any()


def tokenizer(ids: dict[str, int]) -> Tokenizer:
    given = SimpleNamespace(vocabulary=lambda: ids, path="given.json")
    return cast(Any, given)


def test_new_rows_are_those_of_ids_that_only_the_new_tokenizer_has_or_that_no_row_was_for() -> None:
    """The weights have rows for 8 tokens, of which 4 are padding beside a tokenizer with a hole."""
    old = tokenizer({"a": 0, "b": 1, "d": 3, "e": 4})
    new = tokenizer({"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "f": 5})
    growth = VocabularyGrowth.between("mean", 8, 8, old, new)
    assert growth.new.nonzero().flatten().tolist() == [2, 5]
    assert growth.known.nonzero().flatten().tolist() == [0, 1, 3, 4]
    growth = VocabularyGrowth.between("mean", 8, 11, old, new)
    assert growth.new.nonzero().flatten().tolist() == [2, 5, 8, 9, 10]
    # without the old one each row is a token's
    growth = VocabularyGrowth.between("mean", 8, 10, None, new)
    assert growth.new.nonzero().flatten().tolist() == [8, 9]
    assert bool(growth.known.all())
    assert not VocabularyGrowth.between("mean", 8, 8, old, old).new.any()


def test_tokens_that_move_or_go_are_counted_and_the_first_is_named() -> None:
    old = tokenizer({"a": 0, "b": 1, "c": 2})
    assert not [*moved_tokens(old, tokenizer({"a": 0, "b": 1, "c": 2, "d": 3}))]
    (problem,) = moved_tokens(old, tokenizer({"a": 0, "c": 1, "d": 2}))
    assert (problem.fields["count"], problem.fields["id"]) == (2, 1)
    assert problem.fields["now"] == "not there"


def test_the_begin_token_is_that_of_the_weights(llama: Published) -> None:
    assert resolve_run(llama.file, llama.keys("begin", "mean")).data.begin == BOS
