"""A blend has its exact proportions from the first sample on, however it is read."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprec.errors import UserError
from megaprec.text.build import build
from megaprec.text.sources import open_source
from megaprec.text.tokenizer import load_tokenizer
from megaprec.tokens.blend import Blend, WeightedStretch, pattern, shares, taken_before
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.samples import Resets, Samples, split
from tests import runs
from tests.refusals import raises, sentence
from tools.config.run_file import load_run
from tools.journal.records import read_events
from tools.training.corpus import open_corpus


def blend_of(folder: Path, weights: list[float], tokens: list[int], seed: int = 3) -> Blend:
    """Data set n has the tokens n * 1000, n * 1000 + 1, ... in documents of 7; samples are of 8."""
    parts = []
    for number, count in enumerate(tokens):
        with IndexedWriter(folder / f"{number}", 60_000) as writer:
            for start in range(0, count, 7):
                writer.add_document(np.arange(start, min(start + 7, count)) + 1000 * number)
        resets = Resets(True, True, True)
        parts.append(Samples(IndexedDataset(folder / f"{number}"), 8, seed, True, resets=resets))
    return Blend(
        parts,
        [WeightedStretch.first(weights)],
        [f"set{n}" for n in range(len(tokens))],
    )


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_every_prefix_is_within_one_sample_of_its_share(parts: list[int]) -> None:
    period = sum(parts)
    counts = np.cumsum(pattern(parts)[:, None] == np.arange(len(parts)), axis=0)
    share = np.arange(1, period + 1)[:, None] * np.array(parts)
    assert (abs(counts * period - share) < period).all()
    assert counts[-1].tolist() == parts


def test_many_small_data_sets_beside_a_large_one_do_not_pile_up() -> None:
    parts = [1000, *range(1, 60)]
    counts = np.cumsum(pattern(parts)[:, None] == np.arange(60), axis=0)
    assert (
        abs(counts * sum(parts) - np.arange(1, sum(parts) + 1)[:, None] * np.array(parts))
        < sum(parts)
    ).all()


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.7, 0.3], [7, 3]),
        ([1.0, 2.0], [1, 2]),
        ([0.25, 0.5], [1, 2]),
        ([1e-3, 1.0], [1, 1000]),
        ([0.1] * 3, [1] * 3),
    ],
)
def test_weights_are_taken_as_they_are_written(weights: list[float], expected: list[int]) -> None:
    assert shares(weights) == expected
    assert [Fraction(n, sum(expected)) for n in expected] == [
        Fraction(repr(w)) / sum(Fraction(repr(w)) for w in weights) for w in weights
    ]


def test_weights_without_a_short_period_are_refused() -> None:
    with raises("data.blend_weights_too_fine"):
        shares([0.123456789, 0.3])


@settings(deadline=None, max_examples=30)
@given(position=st.integers(0, 300), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_batch_is_the_same_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, position: int, cuts: list[int]
) -> None:
    blend = blend_of(tmp_path_factory.mktemp("cut"), [0.5, 0.2, 0.3], [100, 33, 260])
    starts = position + np.cumsum([0, *cuts[:-1]])
    parts = [blend.batch(int(start), count) for start, count in zip(starts, cuts, strict=True)]
    whole = blend.batch(position, sum(cuts))
    for name in ("tokens", "targets", "ids", "mask", "documents", "positions"):
        assert torch.equal(
            torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)
        ), name


def test_each_data_set_goes_through_its_own_epochs_in_its_own_order(tmp_path: Path) -> None:
    blend = blend_of(tmp_path, [0.5, 0.2, 0.3], [100, 33, 260])
    batch = blend.batch(0, 240)
    which = batch.tokens[:, 0] // 1000
    for number, (part, taken) in enumerate(zip(blend.parts, blend.samples_taken(240), strict=True)):
        own = batch.tokens[which == number]
        alone = part.batch(0, taken)
        assert torch.equal(own, alone.tokens)
        assert torch.equal(batch.targets[which == number], alone.targets)
    assert blend.samples_taken(240) == [120, 48, 72]
    assert blend.samples_taken(7) == (batch.tokens[:7, 0] // 1000).bincount(minlength=3).tolist()


def test_a_sample_is_called_by_its_data_set_and_its_number_there(tmp_path: Path) -> None:
    blend = blend_of(tmp_path, [0.5, 0.2, 0.3], [100, 33, 260])
    batch = blend.batch(17, 50)
    assert len(set(batch.ids.tolist())) > 20
    for tokens, label in zip(batch.tokens, blend.labels(batch.ids), strict=True):
        number, first = divmod(int(tokens[0]), 1000)
        assert label == f"set{number}:{first // 8}"


def test_held_out_text_of_a_blend_is_never_trained_on(tmp_path: Path) -> None:
    blend_of(tmp_path, [1.0, 1.0], [400, 800])
    datasets = [IndexedDataset(tmp_path / f"{n}") for n in range(2)]
    halves = [split(dataset, 8, 0.2, 1) for dataset in datasets]
    train, held = (
        Blend([part for part in some if part], [WeightedStretch.first([1.0, 1.0])], ["a", "b"])
        for some in zip(*halves, strict=True)
    )
    trained, kept = (set(b.labels(b.batch(0, 500).ids)) for b in (train, held))
    assert not trained & kept
    assert len(trained | kept) == 49 + 99


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.lists(st.integers(1, 9), min_size=3, max_size=3)),
        min_size=1,
        max_size=4,
    )
)
def test_each_data_set_goes_on_with_its_next_sample_where_weights_change(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, list[int]]]
) -> None:
    """changes: how many positions some weights hold, and the weights."""
    folder = tmp_path_factory.mktemp("changed")
    plain = blend_of(folder, [1.0, 1.0, 1.0], [100, 33, 260])
    stretches: list[WeightedStretch] = []
    position = 0
    for count, weights in changes:
        taken = tuple(taken_before(stretches, position)) if stretches else (0, 0, 0)
        stretches.append(WeightedStretch(position, tuple(map(float, weights)), taken))
        position += count
    names = ["set0", "set1", "set2"]
    blend = Blend(plain.parts, stretches, names)
    batch = blend.batch(0, position)
    which = batch.tokens[:, 0] // 1000
    taken = blend.samples_taken(position)
    for number, part in enumerate(blend.parts):
        own = batch.tokens[which == number]
        assert len(own) == taken[number]
        assert not len(own) or torch.equal(own, part.batch(0, len(own)).tokens)
    start = 0
    for count, weights in changes:
        held = (which[start : start + count]).bincount(minlength=3)
        start += count
        for number, weight in enumerate(weights):
            assert abs(held[number] - count * weight / sum(weights)) < 1


TEXTS = {"a": "one two three four five six ", "b": "7 8 9 0 1 2 3 ", "c": "zebra yak xenon "}


@pytest.fixture(scope="module")
def blended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run file, and an override that gives it a blend of two texts and a data set made by the
    same tokenizer."""
    folder = tmp_path_factory.mktemp("blend")
    file = runs.write_run(folder)
    for name, text in TEXTS.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text * n}) + "\n" for n in range(1, 25))
        )
    build(
        open_source(str(folder / "c.jsonl")),
        load_tokenizer(folder / "data" / "text.model"),
        folder / "c",
    )
    (folder / "c.model").write_bytes((folder / "data" / "text.model").read_bytes())
    entries = ((f"{folder}/a.jsonl", 0.5), (f"{folder}/b.jsonl", 0.2), (f"{folder}/c", 0.3))
    blend = ", ".join(f'{{source = "{source}", weight = {weight}}}' for source, weight in entries)
    file.write_text(file.read_text().replace(f'source = "{folder}/text.txt"', f"blend = [{blend}]"))
    return file, f"data.cache={folder}/blended"


@pytest.mark.slow
def test_a_run_trains_on_a_blend_in_every_layout(
    blended: tuple[Path, str], capfd: pytest.CaptureFixture[str]
) -> None:
    file, cache = blended
    folder = file.parent
    given = [cache, "precision.compute=fp64", "train.eval_every=3"]
    assert runs.train(file, *given, f"train.folder={folder}/one") == 0
    said = capfd.readouterr().out
    assert "0.5 of the samples from" in said and "epochs in 6 steps" in said
    for name, layout in (("dp", {"data": 2}), ("tp pp", {"tensor": 2, "pipeline": 2})):
        made = runs.train_on(
            file, *given, f"train.folder={folder}/{name}", "train.micro_batch=4", **layout
        )
        runs.assert_close(runs.steps(folder / "one"), runs.steps(made), 1e-9)
    corpus = open_corpus(load_run(folder / "one" / "run.toml"))
    labels = corpus.train.labels(corpus.train.batch(0, 48).ids)
    sources = [str(label).rpartition(":")[0].rpartition("/")[2] for label in labels]
    for name, weight in (("a.jsonl", 0.5), ("b.jsonl", 0.2), ("c", 0.3)):
        assert abs(sources.count(name) - weight * 48) < 1


def _sources_of(labels: list[str]) -> list[tuple[str, int]]:
    """The name of the file and the number of the sample, of each label."""
    named = [label.rpartition(":") for label in labels]
    return [(source.rpartition("/")[2], int(number)) for source, _, number in named]


@pytest.mark.parametrize("way", ["weights", "weights twice", "one set less", "one set alone"])
def test_no_sample_comes_twice_or_never_where_a_run_changes_its_blend(
    way: str, blended: tuple[Path, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """What the ranks read, in the order in which they read it."""
    file, cache = blended
    run = f"train.folder={file.parent}/{way}"
    a, b, c = (f"{file.parent}/{name}" for name in ("a.jsonl", "b.jsonl", "c"))
    first = [(a, 0.5), (b, 0.2), (c, 0.3)]
    later = {
        "weights": [[(a, 0.2), (b, 0.7), (c, 0.1)]],
        "weights twice": [[(a, 0.2), (b, 0.7), (c, 0.1)], first],
        "one set less": [[(a, 0.5), (c, 0.5)]],
        "one set alone": [[(a, 1.0)]],
    }[way]
    read: list[tuple[str, int]] = []
    for part, entries in enumerate([first, *later]):
        steps = 4 * (part + 1)
        blend = ", ".join(f'{{source="{name}", weight={weight}}}' for name, weight in entries)
        # a cache for each: the place of a set in the blend names its files
        keys = [f"{cache} {way} {part}", run, f"train.steps={steps}", f"data.blend=[{blend}]"]
        keys.append(f"data.tokenizer={file.parent}/c.model")
        capfd.readouterr()
        assert runs.train(file, *keys, *(["--allow", "data"] if part else [])) == 0
        said = capfd.readouterr().out
        taken: dict[str, int] = {}
        for name, _ in entries:
            (line,) = (line for line in said.splitlines() if f"from {name}: " in line)
            taken[name] = int(line.partition(f"from {name}: ")[2].split()[0])
        corpus = open_corpus(load_run(file, keys))
        batch = corpus.train.batch(8 * (steps - 4), 32)
        assert isinstance(corpus.train, Blend)
        read += _sources_of(corpus.train.labels(batch.ids))
        for (name, _), samples in zip(entries, corpus.training_parts, strict=True):
            own = [number for source, number in read if source == name.rpartition("/")[2]]
            assert len(own) == taken[name]
            assert own == samples.batch(0, len(own)).ids.tolist()


def test_an_overflow_names_data_set_and_sample(blended: tuple[Path, str]) -> None:
    file, cache = blended
    folder = runs.train_on(
        file,
        cache,
        "precision.compute=fp16",
        "precision.loss_scale=1e38",
        f"train.folder={file.parent}/overflow",
    )
    ids = [
        id for e in read_events(folder) for o in e["offenders"] for id in o.get("sample_ids", [])
    ]
    assert ids
    assert all(id.startswith(f"{file.parent}/") and id.rpartition(":")[2].isdigit() for id in ids)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("data.blend=[]", "no problem"),
        (
            'data.blend=[{source = "nowhere", weight = 1.0}]',
            r'data\.blend\[0\]\.source = "nowhere": '
            + sentence("data.source_missing", name="nowhere"),
        ),
        ('data.blend=[{source = "python", weight = 0.0}]', "greater than 0"),
        ('data.blend=[{source = "python", weight = 1}, {source = "x"}]', "weight"),
        (
            'data.blend=[{source = "python", weight = 0.1234567891}, {source = "b", weight = 1.0}]',
            sentence("data.blend_weights_too_fine"),
        ),
    ],
)
def test_a_blend_that_cannot_be_is_refused_before_launch(
    tmp_path: Path, override: str, why: str
) -> None:
    file = runs.write_run(tmp_path)
    text = (
        file.read_text()
        .replace(f'source = "{tmp_path}/text.txt"\n', "")
        .replace("vocab_size = 330", "vocab_size = 330\nmax_chars = 20000")
    )
    file.write_text(text)
    if why == "no problem":
        load_run(file, [override])
        return
    with pytest.raises(UserError, match=why):
        open_corpus(load_run(file, [override]))


def test_a_blend_and_a_source_contradict_each_other(tmp_path: Path) -> None:
    file = runs.write_run(tmp_path)
    with raises("config.source_and_blend"):
        load_run(file, ['data.blend=[{source = "python", weight = 1.0}]'])


def test_data_sets_of_different_tokenizers_are_not_blended(
    tmp_path: Path, blended: tuple[Path, str]
) -> None:
    file, _ = blended
    for name, model in (("x", b"one"), ("y", b"another")):
        with IndexedWriter(tmp_path / name, 300) as writer:
            writer.add_document(range(200))
        (tmp_path / f"{name}.model").write_bytes(model)
    blend = ", ".join(f'{{source = "{tmp_path}/{name}", weight = 1.0}}' for name in "xy")
    with raises("training.blend_tokenizers"):
        open_corpus(load_run(file, [f"data.blend=[{blend}]"]))
