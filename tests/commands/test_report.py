"""`megaprec report`: one page that needs nothing else, whatever the folder of the run holds."""

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.parity.test_command import open_tags
from tests.refusals import sentence
from tests.runs import train, write_run
from tools import cli
from tools.analysis.report.sections import SECTIONS
from tools.config.run_file import load_run
from tools.verify.parity.certificate import run_digest

EVIL = "</td><script>alert(1)</script><img src=http://x.example/a.png onerror=alert(2)>&\"'"
OTHER_KEYS = "the certificate below is of other keys than those of run.toml"
SCALED = [
    "precision.compute=fp16",
    "precision.initial_scale=65536.0",
    "precision.growth_interval=1",
]
SCALED += ["train.eval_every=2"]
# of the run that was resumed
KEYS = [
    *SCALED,
    "train.steps=7",
    "lr.peak=1e-3",
    "precision.max_scale=1e30",
]
TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "nav", "a", "section", "dl", "div", "dt", "dd", "p",
    "figure", "figcaption", "b", "span", "i", "svg", "path", "line", "rect", "text", "table", "tr", "th", "td", "details", "summary",
    "img", "br",
}  # fmt: skip


class Page(HTMLParser):
    """The tags, attributes and text of a page. A closing tag in a style is not seen as one."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags = set[str]()
        self.attributes = list[tuple[str, str, str]]()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has skipped a step, was resumed with other keys and stopped before its end."""
    file = write_run(tmp_path_factory.mktemp("report"))
    assert train(file, "train.steps=6", *SCALED) == 0
    assert train(file, *KEYS) == 0
    return file.parent / "run"


def made(folder: Path, output: Path) -> str:
    assert cli.main(["report", str(folder), "-o", str(output)]) == 0
    return output.read_text(encoding="utf-8")


def require_alone(html: str) -> Page:
    """Asserts that the page runs nothing, asks for nothing and is well formed."""
    page = Page(html)
    assert open_tags(html) == []
    assert page.tags <= TAGS
    for tag, name, value in page.attributes:
        assert not name.startswith("on") and name not in ("srcset", "action", "data"), (tag, name)
        if name == "href":
            assert re.fullmatch(r"#s\d+", value)
        if name == "src":
            assert value.startswith(("data:image/svg+xml;base64,", "data:image/png;base64,"))
    assert (
        "meta",
        "content",
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    ) in page.attributes
    assert not re.search(
        r"url\(|@import|http:|https:",
        re.sub(r"data:[^\"]*", "", html.replace(EVIL, "")).split("<body")[0],
    )
    return page


def test_the_page_of_a_run_has_its_parts_in_order_and_needs_nothing_else(
    folder: Path, tmp_path: Path
) -> None:
    html = made(folder, tmp_path / "a.html")
    page = require_alone(html)
    titles = re.findall(r"<h2>(.*?)</h2>", html)
    assert titles == [title for title, _ in SECTIONS if title in titles]
    assert {
        "Summary",
        "Curves",
        "Changes on resume",
        "Speed",
        "Memory",
        "Evidence",
        "Configuration",
    } <= set(titles)
    assert "lr.peak: 0.01 -> 0.001 (not bit for bit)" in page.text
    assert "the learning rate jumps from 0.01 in step 6 to 0.001 in step 7" in page.text
    assert "7 of 7" in page.text and "all steps are taken" in page.text
    assert "megaprec parity RUN.toml" in page.text
    assert re.search(r"peak of the process.*?[MG]iB", page.text)
    assert len(html) < 200_000


def test_a_run_whose_steps_were_all_skipped_has_learned_nothing_and_its_page_says_so(
    folder: Path, tmp_path: Path
) -> None:
    said = "every step was skipped: nothing was learned"
    assert said not in made(folder, tmp_path / "some.html")
    all_skipped = Path(shutil.copytree(folder, tmp_path / "run"))
    metrics = all_skipped / "metrics.jsonl"
    records = [
        json.loads(line) | {"outcome": "skipped_overflow"}
        for line in metrics.read_text().splitlines()
    ]
    metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert said in made(all_skipped, tmp_path / "all.html")


def hostile(folder: Path, at: Path) -> Path:
    """A run folder in which every text that can be chosen is an attack."""
    run = at / "<img src=x onerror=alert(3)>"
    run.mkdir(parents=True)
    first = {
        "step": 1,
        "outcome": EVIL,
        "loss": 1.0,
        "grad_norm": 1.0,
        "loss_scale": 1.0,
        "overflow_in": EVIL,
    }
    lines = [
        first | {"eval_loss." + EVIL: 1.0, EVIL: EVIL, "sentinel": EVIL, "tokens": EVIL},
        first | {"step": 2},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    offender = {"name": EVIL, "infs": EVIL, "nans": EVIL}
    events: list[dict[str, Any]] = [
        {"event": "overflow", "step": 1, "outcome": EVIL, "loss": 1, "loss_scale": 1.0, "first_sample": 0,
         "num_samples": 1, "advice": EVIL, "offenders": [offender, EVIL]},
        {"event": "overflow", "step": 1, "outcome": EVIL, "loss_scale": 2.0, "first_sample": 0, "num_samples": 1,
         "advice": {EVIL: EVIL}, "offenders": EVIL},
        {"event": "resume", "step": 1, "checkpoint": EVIL, "ranks": EVIL, "changed": [EVIL], "notes": EVIL,
         "lr_before": EVIL, "lr_next": None},
        {"event": "branched", "step": 1, "checkpoint": EVIL, "run": EVIL, "ranks": EVIL, "changed": EVIL, "notes": [EVIL],
         "lr_before": None, "lr_next": EVIL},
        {"event": "branched", "step": 1, "checkpoint": [EVIL], "run": {EVIL: EVIL}, "ranks": EVIL, "changed": [EVIL],
         "notes": EVIL, "lr_before": EVIL, "lr_next": EVIL},
        {"event": "end", "step": 1, "complete": False, "why": EVIL, "peak_memory": 5, "held_memory": EVIL,
         "memory_of": EVIL},
        {"event": "end", "step": 1, "complete": EVIL, "why": [EVIL], "peak_memory": EVIL},
        {"event": "restart", "step": 1, "ranks": EVIL, "why": EVIL, "left": EVIL},
        {"event": "silent_fault", "step": 1, "checked_step": EVIL, "kind": EVIL, "what": EVIL, "ranks": EVIL,
         "hosts": [EVIL], "certain": EVIL},
        {"event": "prediction", "step": 1, "seconds": EVIL, "measured": 1.0, "basis": EVIL, "kinds": {EVIL: 1.0}},
        {"event": "fp8_shadow", "step": 1, "loss_gap": EVIL, "alarms": [EVIL], "cosines": EVIL, "saturated": EVIL,
         "underflowed": EVIL},
    ]  # fmt: skip
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    saved = (folder / "run.toml").read_text().splitlines()
    extra = ["[log]", f"sample = {json.dumps(EVIL)}  # {EVIL}", f"{EVIL} = 1  # file {EVIL}"]
    (run / "run.toml").write_text("\n".join([saved[0], *extra]))
    (run / "parity.json").write_text(
        json.dumps({"layouts": [{"layout": EVIL, "precision": EVIL, "verdict": EVIL}]})
    )
    row = {"row": EVIL, "steps": [EVIL, EVIL], "verdict": EVIL, "why": EVIL}
    proof = {"first_step": EVIL, "last_step": EVIL, "verdict": EVIL, "rows": [row]}
    (run / "prove.json").write_text(json.dumps(proof))
    (run / "timeline.json").write_text(EVIL)
    (run / "fp8-shadow.png").write_text(EVIL)
    return run


def test_nothing_that_a_run_folder_holds_becomes_a_part_of_the_page(
    folder: Path, tmp_path: Path
) -> None:
    html = made(hostile(folder, tmp_path / "r"), tmp_path / "a.html")
    page = require_alone(html)
    assert page.text.count(EVIL) > 15
    assert "<script" not in html and "<img src=x" not in html


def picture_of_steps(run: Path, event: dict[str, Any]) -> str:
    """Return the picture, on the page of a run, of the predicted and the measured step; empty if it
    has none."""
    (run / "events.jsonl").write_text(json.dumps({"event": "prediction", "step": 1} | event) + "\n")
    page = made(run, run / "page.html")
    start = 'alt="predicted and measured step" src="data:image/svg+xml;base64,'
    if start not in page:
        return ""
    return base64.b64decode(page.split(start)[1].split('"')[0]).decode()


def test_the_page_draws_the_predicted_step_by_kind_above_the_measured_one(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copy(folder / "metrics.jsonl", tmp_path)
    kinds = {"matrix products": 1.5, "attention": 0.5, "the update": 0.0}
    event = {"seconds": 2.0, "measured": 4.0, "basis": "a sheet", "kinds": kinds}
    picture = picture_of_steps(tmp_path, event)
    assert "matrix products: 1.50 s, 75%" in picture
    assert "attention: 500 ms, 25%" in picture
    assert "the update" not in picture
    assert "all kinds together: 4.00 s, 100%" in picture


PREDICTED = {"seconds": 2.0, "measured": 1.0, "basis": "a sheet", "kinds": {"waits": 2.0}}
DAMAGED = [PREDICTED | {"measured": value} for value in ("much", None, "nan", 0, -1)]
DAMAGED += [PREDICTED | {"kinds": 5}, {"seconds": 2.0, "measured": 1.0, "kinds": {"waits": 2.0}}]


@pytest.mark.parametrize("event", DAMAGED)
def test_a_damaged_prediction_is_not_drawn(
    event: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    shutil.copy(folder / "metrics.jsonl", tmp_path)
    assert not picture_of_steps(tmp_path, event)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[" * 5000, b"null", b"5", b"{}", b'{"layouts": [5]}']
)
def test_damaged_files_beside_the_records_end_nothing(
    content: bytes, folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(folder / "metrics.jsonl", run)
    for name in (
        "events.jsonl",
        "run.toml",
        "parity.json",
        "prove.json",
        "timeline.json",
        "fp8-shadow.png",
    ):
        (run / name).write_bytes(content)
    (run / "last_end").mkdir()
    (run / "last_end" / "rank-00000.json").write_bytes(content)
    page = made(run, tmp_path / "a.html")
    require_alone(page)
    for name in ("parity.json", "prove.json"):
        assert f"{name} is not a certificate." in page


@pytest.mark.parametrize("name", ["parity.json", "prove.json"])
def test_a_certificate_of_other_keys_is_told_from_one_of_the_run(
    name: str, folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    counts = {"tensors": 1, "steps": 4, "applied": 3, "clipped": 3, "first_step": 1, "last_step": 4}
    for overrides, foreign in (([], False), (["model.layers=3"], True)):
        about = {
            "configuration": {
                "sha256": run_digest(load_run(folder.parent / "my.toml", [*KEYS, *overrides]))
            }
        }
        proof = {"layouts": [], "rows": [], "verdict": "proven"} | counts | about
        (run / name).write_text(json.dumps(proof))
        assert (OTHER_KEYS in made(run, tmp_path / "a.html")) == foreign
    (run / "run.toml").write_text("")
    assert "whether the certificate below is of this run is not known" in made(
        run, tmp_path / "a.html"
    )


def test_what_cannot_be_reported_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, line in (
        (
            [str(empty), "-o", str(tmp_path / "a.html")],
            sentence("journal.no_run", folder=empty, problem="has no steps in metrics.jsonl"),
        ),
        (
            ["missing", "-o", str(tmp_path / "a.html")],
            sentence("journal.no_run", folder="missing", problem="does not exist"),
        ),
        (["empty", "-o", "a.pdf"], sentence("command.report_suffix", output="a.pdf")),
        (
            ["empty", "-o", str(tmp_path / "no" / "a.html")],
            sentence("command.plot_folder", parent=tmp_path / "no"),
        ),
    ):
        assert cli.main(["report", *words]) == 2
        assert re.search(f"{line}$", capsys.readouterr().err.strip())


@pytest.mark.slow
def test_a_browser_shows_the_page_on_a_narrow_screen_without_scrolling_sideways(
    folder: Path, tmp_path: Path
) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("chromium is not installed")
    html = made(folder, tmp_path / "a.html")
    script = (
        "<script>document.body.style.width='390px';"
        "document.title='wide '+document.body.scrollWidth+' figures "
        "'+document.querySelectorAll('svg path').length"
        "</script></body>"
    )
    looked_at = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html).replace(
        "</body>", script
    )
    (tmp_path / "b.html").write_text(looked_at, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    options += [
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command = [
        browser,
        *options,
        "--window-size=500,900",
        "--dump-dom",
        f"file://{tmp_path}/b.html",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    found = re.search(r"<title>wide (\d+) figures (\d+)</title>", shown)
    assert found is not None, shown[:500]
    assert int(found[1]) <= 390 and int(found[2]) > 20
