"""A run whose blend changes with the samples reads what its plan says: resumed, branched and in any
layout."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.tokens.indexed import IndexedWriter
from models.engine.passes import Share
from tests import runs
from tests.ranks import run_ranks
from tests.refusals import raises, sentence
from tools import cli
from tools.analysis.plots.training_plot import pictures
from tools.config.resolved_run import resolve_run
from tools.config.run_file import load_run
from tools.config.tables.data_settings import Data
from tools.journal.records import read_metrics
from tools.training.branch import open_start
from tools.training.corpus import open_corpus
from tools.training.trainer import Trainer

LENGTH = 4
SETS = {"a": range(100), "b": range(100, 300)}  # ids, each once, so that they name a sample
STEPS = 10
BATCH = 8
RUN = """
[model]
layers = 2
hidden = 16
heads = 4
kv_heads = 2
ffn = 32
vocab = 300
[data]
blend = [
    {{ source = "{folder}/a", weight = [[0, 0.75], [20, 0.25], [41, 0.0]] }},
    {{ source = "{folder}/b", weight = 0.25 }},
]
held_out = 0.0
[lr]
peak = 1e-2
schedule = "constant"
[train]
steps = 10
global_batch = 8
micro_batch = 2
seq_length = 4
threads = 1
folder = "{folder}/run"
[checkpoint]
every = 1
keep = "all"
[log]
plot = false
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changing")
    for name, ids in SETS.items():
        with IndexedWriter(folder / name, 300) as writer:
            writer.add_document(np.array(ids))
    path = folder / "my.toml"
    path.write_text(RUN.format(folder=folder))
    return path


def train_and_record(mesh: DeviceMesh, file: Path, overrides: list[str], out: Path) -> None:
    """Train, and write down the first ids of the samples that this replica has read."""
    config = resolve_run(file, overrides)
    start = open_start(config)
    trainer = Trainer(config, open_corpus(config), mesh, start.path if start else None)
    take = trainer._batches.take
    read = dict[int, int]()

    def recorded(first_sample: int, is_last: bool) -> Share:
        share = take(first_sample, is_last)
        for row, first_id in enumerate(share.tokens[:, 0].tolist()):
            read[first_sample + share.first + row] = first_id
        return share

    trainer._batches.take = recorded  # type: ignore[method-assign]
    trainer.run()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (out / f"{rank}.json").write_text(json.dumps(read))


def read_by(file: Path, out: Path, *overrides: str, **axes: int) -> dict[int, int]:
    """The first id of the sample at each position, as all replicas together have read it."""
    out.mkdir()
    keys = {"tp": "tensor", "pp": "pipeline", "dp": "data"}
    mesh = {axis: axes.get(key, 1) for axis, key in keys.items()}
    layout = [f"parallel.{key}={mesh[axis]}" for axis, key in keys.items()]
    given = [*layout, *overrides]
    run_ranks(train_and_record, mesh, file=file, overrides=given, out=out)
    found = dict[int, int]()
    for path in out.glob("*.json"):
        for position, first_id in json.loads(path.read_text()).items():
            # ranks that share a sample have read the same
            assert found.setdefault(int(position), first_id) == first_id
    return found


def assert_as_planned(read: dict[int, int]) -> None:
    """Each phase has its exact proportions, and each data set goes through whole epochs."""
    assert sorted(read) == list(range(STEPS * BATCH))
    is_of_a = [read[position] < 100 for position in sorted(read)]
    for begin, end, share in ((0, 20, 0.75), (20, 41, 0.5), (41, 80, 0.0)):
        for stop in range(begin, end + 1):
            assert abs(sum(is_of_a[begin:stop]) - share * (stop - begin)) < 1
    for ids in SETS.values():
        num_samples = (len(ids) - 1) // LENGTH
        own = [first for _, first in sorted(read.items()) if first in ids]
        times = Counter(own)
        all_samples = [ids[number * LENGTH] for number in range(num_samples)]
        assert set(times) <= set(all_samples)
        whole_epochs = len(own) // num_samples
        assert {times[first] - whole_epochs for first in all_samples} <= {0, 1}
    # more than an epoch of b
    assert sum(not from_a for from_a in is_of_a) > 49


def assert_told(read: dict[int, int], records: list[dict[str, Any]]) -> None:
    """The records say of each data set what was read of it, and nothing else."""
    for record in records:
        end = record["step"] * BATCH
        for name, ids in SETS.items():
            of_step = [read[position] in ids for position in range(end - BATCH, end)]
            of_run = [read[position] in ids for position in range(end)]
            assert record[f"share/{name}"] == sum(of_step) / BATCH
            assert record[f"tokens/{name}"] == sum(of_run) * LENGTH
            assert (f"loss/{name}" in record) == any(of_step)
        told = [record.get(f"loss/{name}", 0.0) * record[f"share/{name}"] for name in SETS]
        assert sum(told) == pytest.approx(record["loss"], rel=1e-6)
    # in the last phase a has no share
    assert [("loss/a" in record) for record in records] == [True] * 6 + [False] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"data": 2}, {"tensor": 2, "pipeline": 2}, {"data": 2, "micro_batch": 4}], ids=str
)
def test_numbers_of_data_sets_are_the_same_in_every_layout(
    layout: dict[str, int], file: Path, tmp_path: Path
) -> None:
    given = ["precision.compute=fp64"]
    assert runs.train(file, *given, f"train.folder={tmp_path}/one") == 0
    sizes = dict(layout)
    if "micro_batch" in sizes:
        given.append(f"train.micro_batch={sizes.pop('micro_batch')}")
    other = runs.train_on(file, *given, f"train.folder={tmp_path}/other", **sizes)
    ours, theirs = runs.steps(tmp_path / "one"), runs.steps(other)
    assert [record.keys() for record in ours] == [record.keys() for record in theirs]
    runs.assert_close(ours, theirs, 1e-9)


def test_names_of_data_sets_are_those_of_their_entries_or_sources() -> None:
    entries = [
        {"source": "s3://bucket/web-2024?signature=x", "weight": 1.0},
        {"source": ["texts/**/*.md", "b.txt"], "weight": 1.0},
        {"source": "other/web-2024/", "weight": 1.0},
        {"source": "python", "weight": 1.0, "name": "code"},
    ]
    names = Data.model_validate({"blend": entries}).blend_names
    assert names == ["web-2024", "_.md", "web-2024-2", "code"]


@pytest.mark.parametrize("source", [".", "..", "./", "texts/..", "s3://bucket/..", "texts/..."])
def test_the_name_of_a_source_is_no_folder_of_its_own_or_above(source: str) -> None:
    """Trackers whose numbers are files refuse such a name."""
    entries = [{"source": source, "weight": 1.0}]
    (name,) = Data.model_validate({"blend": entries}).blend_names
    assert name.strip(".")


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (("a/b", "c"), "config.blend_name"),
        (("..", "c"), "config.blend_name"),
        ((".", "c"), "config.blend_name"),
        (("a", "a"), "config.blend_name_twice"),
    ],
)
def test_names_that_cannot_be_are_refused(names: tuple[str, str], code: str, file: Path) -> None:
    entries = [f'{{source="{name}", weight=1, name="{name}"}}' for name in names]
    with raises(code):
        load_run(file, [f"data.blend=[{', '.join(entries)}]"])


def test_the_picture_and_the_report_have_a_curve_and_a_row_for_each_data_set(
    file: Path, tmp_path: Path
) -> None:
    assert runs.train(file, f"train.folder={tmp_path}/run") == 0
    records = read_metrics(tmp_path / "run")
    charts = [chart for chart in pictures(records).charts if "data set" in chart.title]
    assert [chart.title.split()[0] for chart in charts] == ["loss", "share"]
    for chart in charts:
        assert sorted(series.label for series in chart.series) == ["a", "b"]
    (of_a,) = (series for series in charts[0].series if series.label == "a")
    assert of_a.x == [1, 2, 3, 4, 5, 6]
    assert cli.main(["report", f"{tmp_path}/run", "-o", f"{tmp_path}/page.html"]) == 0
    page = (tmp_path / "page.html").read_text()
    _, _, section = page.partition("<h2>Data sets</h2>")
    row = re.search(r"<tr>\s*<td[^>]*>a</td>.*?</tr>", section, re.DOTALL)
    assert row and f">{records[-1]['tokens/a']:,}<" in row[0]


def test_every_sample_is_read_as_planned_also_resumed_and_in_other_layouts(
    file: Path, tmp_path: Path
) -> None:
    folder = f"train.folder={tmp_path}/one"
    whole = read_by(file, tmp_path / "whole", folder)
    assert_as_planned(whole)
    assert_told(whole, runs.steps(tmp_path / "one"))
    # stopped in the second phase, on 2 x 2 ranks, and resumed on one replica more
    resumed = f"train.folder={tmp_path}/two"
    first = read_by(file, tmp_path / "first", resumed, "train.steps=4", tensor=2, data=2)
    second = read_by(file, tmp_path / "second", resumed, "train.micro_batch=1", data=2)
    assert first | second == whole
    assert not first.keys() & second.keys()


def test_a_run_resumed_or_branched_within_a_phase_has_the_bits_of_the_whole_run(
    file: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    assert runs.train(file, f"train.folder={whole}") == 0
    for step in (2, 4):  # before the change after 20 samples, and between it and the next
        resumed = runs.rewind(whole, tmp_path / f"resumed{step}", step)
        assert runs.train(file, f"train.folder={resumed}") == 0
        assert runs.steps(resumed) == runs.steps(whole)
        branched = tmp_path / f"branched{step}"
        begin = f"{whole}/checkpoints/step_{step:08d}"
        assert Path(begin).is_dir()
        branch = [f"train.branch_from={begin}", f"train.folder={branched}"]
        assert runs.train(file, *branch) == 0
        assert runs.steps(branched) == runs.steps(whole)[step:]
        for other in (resumed, branched):
            last = f"checkpoints/step_{STEPS:08d}"
            ours, theirs = runs.tensors(other / last), runs.tensors(whole / last)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_plan_needs_a_flag_and_goes_on_with_the_next_samples(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = f"train.folder={tmp_path}/run"
    first = read_by(file, tmp_path / "first", folder, "train.steps=4")
    entries = [(file.parent / "a", "[[0, 0.0], [50, 1.0]]"), (file.parent / "b", "[[0, 1.0]]")]
    blend = ", ".join(f'{{source="{source}", weight={weight}}}' for source, weight in entries)
    other = f"data.blend=[{blend}]"
    assert runs.train(file, folder, other) == 2
    said = capfd.readouterr().err
    assert (
        "data.blend[0].weight: [[0, 0.75], [20, 0.25], [41, 0.0]] -> [[0, 0.0], [50, 1.0]]" in said
    )
    assert "--allow data" in said
    second = read_by(file, tmp_path / "second", folder, other)
    order = [first_id for _, first_id in sorted((first | second).items())]
    assert all(first_id >= 100 for first_id in order[32:50])
    assert sum(first_id < 100 for first_id in order[50:]) == 15
    for ids in SETS.values():
        own = [first_id for first_id in order if first_id in ids]
        num_samples = (len(ids) - 1) // LENGTH
        whole_epochs = len(own) // num_samples
        times = Counter(own)
        assert {times[ids[n * LENGTH]] - whole_epochs for n in range(num_samples)} <= {0, 1}


def test_each_set_goes_on_with_its_next_sample_whatever_its_place_in_the_blend(
    file: Path, tmp_path: Path
) -> None:
    """Also one that was moved, and beside one that begins in the place of another."""
    c = tmp_path / "c"
    with IndexedWriter(c, 300) as writer:
        writer.add_document(np.arange(60)[::-1])
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{file.parent}/b{suffix}", tmp_path / f"moved{suffix}")
    folder = f"train.folder={tmp_path}/run"
    keys = [folder, "data.shuffle=false"]
    first = read_by(file, tmp_path / "first", *keys, "train.steps=4")
    entries = [(tmp_path / "moved", 0.5), (file.parent / "a", 0.25), (c, 0.25)]
    for blend in (entries[:2], entries[:1] + entries[2:], entries[1:]):
        sets = ", ".join(f'{{source="{source}", weight={weight}}}' for source, weight in blend)
        again = runs.rewind(tmp_path / "run", tmp_path / f"again{len(list(tmp_path.iterdir()))}", 4)
        given = [f"train.folder={again}", "data.shuffle=false", f"data.blend=[{sets}]"]
        second = read_by(file, tmp_path / f"{again.name}_read", *given)
        *_, record = runs.steps(again)
        for source, _ in blend:
            ids = {"a": SETS["a"], "moved": SETS["b"], "c": range(59, -1, -1)}[source.name]
            firsts = ids[:-LENGTH:LENGTH]
            order = [first_id for _, first_id in sorted((first | second).items())]
            own = [first_id for first_id in order if first_id in firsts]
            assert own == [firsts[n % len(firsts)] for n in range(len(own))]
            assert record[f"tokens/{source.name}"] == len(own) * LENGTH


@pytest.mark.parametrize(
    ("weight", "code"),
    [
        ("[[5, 0.5]]", "config.blend_begin"),
        ("[[0, 0.5], [9, 0.1], [9, 0.2]]", "config.blend_order"),
        ("[[0, 0.0], [7, 0.0]]", "config.blend_zero"),
        ("[[0, 0.123456789], [7, 1.0]]", "data.blend_weights_too_fine"),
    ],
)
def test_points_that_cannot_be_are_refused(
    weight: str, code: str, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    blend = f'{{source="{file.parent}/a", weight={weight}}}, {{source="{file.parent}/b", weight=1}}'
    assert runs.train(file, f"data.blend=[{blend}]") == 2
    said = capfd.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert re.search(sentence(code), said)
