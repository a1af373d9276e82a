"""`megaprec schedule` and the keys of a run file about schedules: what is told is right, and what
is wrong is told."""

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megaprec.errors import Problem, UserError
from parallel.pipeline.kinds import schedule
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import simulate
from tests.refusals import raises, sentence, shows
from tests.runs import losses, train, train_on, write_run
from tools.analysis.plots.drawing import Drawing, Rect, Text, to_svg
from tools.analysis.plots.timeline import Panel, as_text, draw
from tools.cli import main
from tools.config.run_file import load_run
from tools.journal.timeline_file import TIMELINE, read_trace, write_trace

REQUIRED = (
    "model.hidden=16",
    "model.heads=2",
    "train.steps=1",
    "train.global_batch=8",
    "train.micro_batch=1",
)
BARE = (*REQUIRED, "train.seq_length=8", "model.vocab=64", "data.vocab_size=64")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["schedule", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["schedule", *map(str, arguments)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb-v"])
def test_the_ranks_hold_at_most_the_micro_batches_that_the_line_of_memory_says(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "--pipeline", 4, "--microbatches", 8, "--kind", kind)
    rows = re.findall(r"^\d +[\d ]+ +[\d.]+% +([\d.]+)$", text, re.M)
    assert len(rows) == 4
    assert f"memory  {max(map(float, rows)):.3g} (" in text


def test_it_tells_bubble_and_memory_beside_the_textbook(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--pipeline", 4, "--microbatches", 8, "--kind", "1f1b")
    assert "bubble  37.5% (textbook 37.5% = (p - 1) / m): " in text
    assert "memory  4 (textbook 4 = p): " in text
    assert re.search(r"^0 +0 +27\.3% +4$", text, re.MULTILINE)
    text = said(capsys, "--pipeline", 4, "--microbatches", 8, "--kind", "zb-v")
    assert "bubble  0.0%" in text and "4 ranks x 2 stages" in text
    slow = said(
        capsys, "--pipeline", 4, "--microbatches", 8, "--costs", "1,1.5,0.5", "--transfer", "0.5"
    )
    assert "bubble  37.5%" not in slow


def test_a_text_timeline_shows_who_does_what_and_when() -> None:
    panel = Panel("", simulate(schedule("interleaved", 2, 2)), 2)
    assert as_text(panel, 80).splitlines() == [
        "rank 0   F0 F1 f0 f1 ......b0    ...b1    B0    B1    ",
        "rank 1   ...F0 F1 f0 b0    f1 b1    B0    B1    ......",
    ]


def test_every_form_is_written_and_what_can_be_read_back_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"drawn{suffix}" for suffix in (".svg", ".png", ".json", ".txt")]
    outputs = [word for file in files for word in ("-o", file)]
    text = said(capsys, "--kind", "zb-h2", "--pipeline", 3, "--microbatches", 5, *outputs)
    assert all(f"written    {file}" in text for file in files)
    svg, png, trace, own = files
    s = schedule("zb-h2", 3, 5)
    assert Schedule.parse(own.read_text()) == s
    assert sorted(map(str, read_trace(trace))) == sorted(map(str, simulate(s)))
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"thread_name", "F0.0", "W2.4", "rA1.0"} <= names
    assert png.read_bytes().startswith(b"\x89PNG")
    root = ElementTree.parse(svg).getroot()
    tips = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len([tip for tip in tips if not tip.endswith("held")]) == 3 * 3 * 5
    again = said(capsys, "--own", own)
    assert again.split("\n\n")[2:] == text.split("written")[0].split("\n\n")[2:]


def test_a_drawing_stays_inside_its_frame_and_blocks_of_a_rank_do_not_overlap() -> None:
    for kind in ("gpipe", "interleaved", "zb-v"):
        s = schedule(kind, 4, 9)
        drawing = draw(
            "title", ["a line"], [Panel("one", simulate(s), 4), Panel("two", simulate(s), 4)]
        )
        blocks = [shape for shape in drawing.shapes if isinstance(shape, Rect)]
        assert all(
            r.x >= 0 and r.x + r.width <= drawing.width and r.y + r.height <= drawing.height
            for r in blocks
        )
        named = [r for r in blocks if r.tip and not r.tip.endswith("held")]
        assert len(named) == 2 * sum(
            span.end > span.start for span in simulate(s) if span.instruction.op in "FBIW"
        )
        for row in {r.y for r in named}:
            ends = sorted((r.x, r.x + r.width) for r in named if r.y == row)
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_text_in_a_picture_is_escaped() -> None:
    svg = to_svg(Drawing(10, 10, [Text(0, 0, "<a> & b")]))
    assert "&lt;a&gt; &amp; b" in svg
    ElementTree.fromstring(svg)


def test_a_schedule_of_ones_own_that_would_hang_is_named_and_drawn_with_a_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.txt"
    picture = tmp_path / "own.svg"
    own.write_text(
        "F0.0 sA0.0 F0.1 sA0.1 rG0.1 B0.1 rG0.0 B0.0 R0\nrA1.0 F1.0 B1.0 sG1.0 rA1.1 F1.1 "
        "B1.1 sG1.1 R1\n"
    )
    text = refused(capsys, "--own", own, "-o", picture)
    assert "this schedule cannot finish" in text
    assert re.search(r"rank 0: .*\[rG0\.1\].*<-- waits for sG1\.1 of rank 1, behind sG1\.0", text)
    svg = picture.read_text()
    assert (
        "cannot run" in svg
        and "rank 0: waits for sG1.1 of rank 1, behind sG1.0" in svg
        and "#d1242f" in svg
    )
    own.write_text("F0.0 F0.1 B0.0\nF1.0 B1.0 F1.1 B1.1\n")
    text = refused(capsys, "--own", own, "-o", picture)
    assert text.startswith("rank 0: B0.1 is missing")
    assert "rank 0: B0.1 is missing" in picture.read_text()


BAD = [
    (
        ("--kind", "zb-v", "--chunks", 3),
        sentence("pipeline.other_chunks", needed=2, chunks=3),
    ),
    (
        ("--pipeline", 0, "--microbatches", 0),
        sentence("pipeline.count_below_one", name="pipeline ranks", count=0),
    ),
    (("--costs", "1,2"), sentence("command.costs_form", text="1,2")),
    (("--costs", "1,0,1"), sentence("command.costs_range", text="1,0,1")),
    (
        ("-o", "drawing.pdf"),
        sentence(
            "command.schedule_suffix",
            path="drawing.pdf",
            output_forms=re.compile(r"\.svg and \.png"),
        ),
    ),
    (
        ("--own", "nowhere.txt"),
        sentence(
            "config.schedule_unreadable", path="nowhere.txt", reason="No such file or directory"
        ),
    ),
    (("--measured", "nowhere.json"), sentence("plots.trace_unreadable", path="nowhere.json")),
]


@pytest.mark.parametrize(("arguments", "says"), BAD)
def test_bad_arguments_are_told(
    arguments: tuple[object, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(says, refused(capsys, *arguments))
    assert not [*tmp_path.iterdir()]


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for text in ("{", "[]", '{"traceEvents": [{"ph": "X", "name": "F0"}]}'):
        path.write_text(text)
        with raises("plots.trace_foreign"):
            read_trace(path)
    write_trace(path, simulate(schedule("1f1b", 2, 2)), "again")
    assert read_trace(path)


RUNS = [
    (
        ("parallel.chunks=2", "model.layers=8"),
        sentence("pipeline.other_chunks", kind="parallel.chunks 2: 1f1b", needed=1, chunks=2),
    ),
    (
        ("parallel.schedule=zb-v", "parallel.chunks=3", "model.layers=8"),
        sentence("pipeline.other_chunks", needed=2, chunks=3),
    ),
    (
        ("parallel.schedule=zb-v", "parallel.pipeline=2", "model.layers=3"),
        sentence("config.too_many_stages", pipeline="parallel.pipeline 2 x 2 chunks = 4", layers=3),
    ),
    (
        (
            "parallel.schedule=interleaved",
            "parallel.chunks=3",
            "parallel.pipeline=2",
            "model.layers=5",
        ),
        sentence("config.too_many_stages", pipeline="parallel.pipeline 2 x 3 chunks = 6", layers=5),
    ),
    (
        ("parallel.cuts=[2, 1]", "parallel.pipeline=2", "model.layers=4"),
        sentence(
            "config.cuts",
            cuts="[2, 1]",
            cut_layers=3,
            pieces=2,
            pipeline="parallel.pipeline 2",
            layers=4,
        ),
    ),
    (("parallel.cuts=[4, 0]", "parallel.pipeline=2", "model.layers=4"), "parallel.cuts"),
]


@pytest.mark.parametrize(("overrides", "says"), RUNS)
def test_schedules_that_do_not_fit_a_run_are_told_at_load(
    overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UserError) as refusal:
        load_run(None, [*BARE, *overrides])
    assert any(re.search(says, problem) for problem in refusal.value.problems), (
        refusal.value.problems
    )


def test_a_schedule_file_that_does_not_fit_a_run_is_told_at_load(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    run = [*BARE, "model.layers=4", "parallel.pipeline=2", f"parallel.schedule_file={own}"]
    with raises("config.schedule_unreadable"):
        load_run(None, run)
    own.write_text(str(schedule("1f1b", 2, 4)))
    with raises("config.schedule_microbatches", microbatches=4, microbatches_of_run=8):
        load_run(None, run)
    own.write_text(str(schedule("1f1b", 3, 8)))
    with raises("config.schedule_ranks", ranks=3, pipeline=2):
        load_run(None, run)
    own.write_text(str(schedule("1f1b", 2, 8)).replace("B1.3 ", ""))
    with pytest.raises(UserError, match=r"rank 1: B1\.3 is missing"):
        load_run(None, run)
    own.write_text(str(schedule("zb-h1", 2, 8)))
    assert load_run(None, run).schedule == schedule("zb-h1", 2, 8)


@pytest.mark.slow
def test_a_run_is_planned_by_its_own_stages_and_measured_beside_it(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [
        "model.layers=4",
        "parallel.schedule=zb-v",
        "log.timeline=2",
        "train.steps=2",
        f"train.folder={tmp_path}",
    ]
    folder = train_on(run_file, *keys, pipeline=2, tensor=2)
    recorded = read_trace(folder / TIMELINE)
    config = load_run(run_file, [*keys, "parallel.pipeline=2", "parallel.tensor=2"])
    assert [(s.rank, s.instruction) for s in recorded] == [
        (r, i) for r in (0, 1) for i in config.schedule.programs[r]
    ]
    picture = tmp_path / "run.svg"
    text = said(capsys, run_file, *keys, "parallel.pipeline=2", "parallel.tensor=2", "-o", picture)
    assert re.search(r"^0 +0 +0 \+ embedding +[\d,]+ +\d+\.\d%", text, re.MULTILINE)
    assert re.search(r"^3 +0 +3 \+ head ", text, re.MULTILINE)
    assert "measured: bubble" in text
    assert "predicted: bubble" in picture.read_text() and "measured: bubble" in picture.read_text()
    other = [run_file, *keys, "parallel.pipeline=2", "parallel.schedule=interleaved"]
    assert main(["schedule", *map(str, other)]) == 0
    left_out = f"left out   {folder / TIMELINE}, which was recorded with another schedule"
    assert left_out in capsys.readouterr().err, "stdout is the report alone"
    assert shows(
        refused(capsys, *other, "--measured", folder / TIMELINE), "command.measured_other_schedule"
    )


@pytest.mark.slow
def test_a_model_with_experts_has_a_table_too(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [
        "model.family=mixtral",
        "model.layers=4",
        "parallel.pipeline=2",
        "parallel.schedule=zb-v",
    ]
    assert (
        len(
            re.findall(
                r"^\d +\d +\d.*FLOP .* [\d.]+ [KM]iB$", said(capsys, run_file, *keys), re.MULTILINE
            )
        )
        == 4
    )


def test_the_table_of_stages_names_the_modules_of_multi_token_prediction(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, run_file, "parallel.pipeline=2", "model.mtp_layers=2", "model.dropout=0.0")
    assert re.search(r"^1 +1 +1 \+ 2 mtp \+ head ", text, re.MULTILINE)


def test_a_run_of_eight_ranks_shows_all_its_memory_and_no_column_covers_another(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where sizes are long: right ends are as far apart as texts are wide."""
    text = said(
        capsys,
        run_file,
        "parallel.pipeline=2",
        "parallel.tensor=2",
        "-o",
        tmp_path / "run.svg",
        "--gpu",
        "H100",
    )
    assert re.search(
        r"^rank +stages +waits +holds +weights +gradients +optimizer +activations +other +total$",
        text,
        re.M,
    )
    assert "device  H100: fits: " in text
    facts = {"holds": ["1024"], "activations": ["20553.7 MiB"], "total": ["1.00 GiB"]}
    drawn = draw("", [], [Panel("", simulate(schedule("1f1b", 1, 1)), 1, "s", facts)])
    ends = [
        (shape.x, len(shape.text))
        for shape in drawn.shapes
        if isinstance(shape, Text) and shape.anchor == "end"
    ]
    for heading in (True, False):
        row = sorted(ends[:3] if heading else ends[3:])
        assert len(row) == 3
        assert all(right - left > 7.5 * width for (left, _), (right, width) in pairwise(row))


@pytest.mark.slow
def test_every_schedule_and_cut_trains_the_same_losses(run_file: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text(str(schedule("zb-h1", 2, 4)))
    keys = ["model.layers=5", "train.steps=3"]
    assert train(run_file, *keys, f"train.folder={tmp_path / 'alone'}") == 0
    variants = {
        "own": (f"parallel.schedule_file={own}", "parallel.cuts=[4,1]"),
        "interleaved": (
            "parallel.schedule=interleaved",
            "parallel.chunks=2",
            "parallel.cuts=[1,2,1,1]",
        ),
        "zb-h2": ("parallel.schedule=zb-h2",),
    }
    for name, chosen in variants.items():
        folder = train_on(run_file, *keys, *chosen, f"train.folder={tmp_path / name}", pipeline=2)
        assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


def test_a_schedule_that_may_have_been_edited_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.txt"
    own.write_text("# mine\n")
    assert (
        main(
            ["schedule", "--kind", "1f1b", "--pipeline", "2", "--microbatches", "2", "-o", str(own)]
        )
        == 2
    )
    line = Problem.of("command.schedule_exists", path=own)
    assert capsys.readouterr().err.splitlines() == [line]
    assert own.read_text() == "# mine\n"


@pytest.mark.parametrize(
    ("has_file", "options", "name"),
    [
        (True, ["--kind", "1f1b"], "kind"),
        (True, ["--pipeline", "4"], "pipeline"),
        (True, ["--microbatches", "2"], "microbatches"),
        (True, ["--chunks", "0"], "chunks"),
        (True, ["--costs", "1,2,3"], "costs"),
        (True, ["--own", "a.txt"], "own"),
        (False, ["--own", "a.txt", "--pipeline", "2"], "pipeline"),
        (False, ["--gpu", "H100"], "gpu"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    has_file: bool,
    options: list[str],
    name: str,
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = [str(run_file)] if has_file else []
    assert main(["schedule", *files, *options]) == 2
    assert shows(capsys.readouterr().err, "command.schedule_option_idle", name=name)


@pytest.mark.parametrize(("kind", "microbatches"), [("1f1b", 256), ("1f1b", 90), ("zb-v", 150)])
def test_blocks_of_every_kind_can_be_seen_in_a_picture_of_any_length(
    kind: str, microbatches: int
) -> None:
    spans = simulate(schedule(kind, 4, microbatches))
    drawing = draw("title", [], [Panel("predicted", spans, 4)])
    blocks = [r for r in drawing.shapes if isinstance(r, Rect) and r.tip]
    for letter in {span.instruction.op for span in spans} & set("FBIW"):
        widths = [r.width for r in blocks if r.tip.startswith(letter)]
        # Those at a cut are shown in part.
        assert sorted(widths)[len(widths) // 4] >= 1.6
    # The first and the last computation are there, with the time at which they are.
    first = min(spans, key=lambda span: span.start).instruction
    last = max(spans, key=lambda span: span.end).instruction
    assert any(r.tip.startswith(f"{first} ") for r in blocks)
    assert any(r.tip.startswith(f"{last} ") for r in blocks)
    end = max(span.end for span in spans)
    ticks = [float(s.text) for s in drawing.shapes if isinstance(s, Text) and s.anchor == "middle"]
    assert 0.85 * end <= max(ticks) <= end
    assert all(r.x + r.width <= drawing.width for r in blocks)


def test_a_text_timeline_that_does_not_fit_shows_its_beginning_and_its_end() -> None:
    lines = as_text(Panel("", simulate(schedule("1f1b", 2, 100)), 2), 50).splitlines()
    assert lines == [
        "rank 0   FF..BBFBBFBBFBBFBB ... FBBFBBFBBFBBFBB.BB",
        "rank 1   .FBBFBBFBBFBBFBBFB ... BFBBFBBFBBFBBFBB..",
    ]
