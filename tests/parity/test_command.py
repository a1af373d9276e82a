"""`megaprec parity` from end to end: what it says, leaves and returns; bad input; and how runs are
made small."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megaprec.errors import Problem
from models.parameter_counts import num_parameters
from models.presets import PRESETS
from tests.refusals import sentence, shows
from tools import cli
from tools.commands import doctor_layout
from tools.commands.parity import fitting_layouts
from tools.config.run_file import load_run
from tools.verify.parity.certificate import _uncovered_sizes, not_tried
from tools.verify.parity.compare import Difference, worst
from tools.verify.parity.layouts import every
from tools.verify.parity.runs import LayoutLimits, alike_size, alone, made_ready, shrunk
from tools.verify.parity.summary import conclusion, show, untried_parts

ROOT = Path(__file__).parents[2]
TRAIN = [
    "train.steps=9",
    "train.global_batch=12",
    "train.micro_batch=2",
    "train.seq_length=64",
    "train.folder=unused",
]


# --- the command


def command(*arguments: object) -> int:
    threads = torch.get_num_threads()
    try:
        return cli.main(["parity", *map(str, arguments)])
    finally:
        torch.set_num_threads(threads)


def own_model(folder: Path, change: tuple[str, str] = ("", "")) -> list[str]:
    """Arguments for the run of the example, its model changed."""
    text = (ROOT / "examples" / "own_model.py").read_text()
    assert change[0] in text
    (folder / "mine.py").write_text(text.replace(*change))
    run = ROOT / "examples" / "own_model.toml"
    return [str(run), f"model.factory={folder}/mine.py:build", f"train.folder={folder}/run"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_model_of_ones_own_passes_and_leaves_a_certificate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = own_model(tmp_path)
    assert (
        command(*arguments, "optimizer.clip=0.1", "--precision", "both", "--layouts", "tp=2,pp=2")
        == 0
    )
    said = capfd.readouterr().out
    assert "all 2 comparisons agree with one process" in said
    made = json.loads((tmp_path / "run" / "parity.json").read_text())
    assert made["verdict"] == "proven"
    assert [(one["layout"], one["precision"]) for one in made["layouts"]] == [
        ("tp=2,pp=2", "float64"),
        ("tp=2,pp=2", "bf16"),
    ]
    assert made["applied"] == made["clipped"] == 3
    assert made["steps"] == 4
    exact = made["layouts"][0]["quantities"]
    assert exact["gradient"]["compared"] == 3 * made["tensors"]
    assert exact["gradient"]["error"] <= exact["gradient"]["bound"] == 1e-12
    assert made["changes"]["model.hidden"] == ["64", "16"]
    page = (tmp_path / "run" / "parity.html").read_text()
    assert open_tags(page) == []
    assert "all 2 comparisons agree" in page


def open_tags(page: str) -> list[str]:
    """Elements of an HTML page that are not closed, or not in order."""

    class Reader(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.open += [tag] if tag != "meta" else []

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    reader = Reader()
    reader.feed(page)
    return reader.open


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_broken_model_of_ones_own_is_found_with_exit_code_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = own_model(tmp_path, (", partial=context.cut_sequence, mean", ", mean"))
    assert command(*arguments, "--json", "--layouts", "tp=2") == 1
    made = json.loads(capfd.readouterr().out)
    (layout,) = made["layouts"]
    assert made["verdict"] == layout["verdict"] == "wrong"
    assert (layout["first"]["phase"], layout["first"]["place"]) == ("gradients", "layers.*.scale")
    assert (layout["first"]["quantity"], layout["first"]["name"]) == ("gradient", "layers.3.scale")
    assert "layers.3.scale among them" in layout["likely_cause"]
    way = {stop["name"]: stop["verdict"] for stop in layout["way"]}
    assert way["layers.2.down>out"] == way["loss"] == "proven", (
        "models of one's own have borders too"
    )
    assert way["gradients"] == "wrong"
    page = (tmp_path / "run" / "parity.html").read_text()
    assert open_tags(page) == []
    assert re.search(r'<li class="wrong first"[^>]*>gradients</li>', page)
    assert {
        d["name"] for d in layout["differing"] if d["step"] == 1 and d["quantity"] == "gradient"
    } == {f"layers.{n}.scale" for n in range(4)}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_fault_in_the_forward_pass_is_named_by_module_and_shown_on_the_page(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = own_model(
        tmp_path, ("return x + dropout(y,", "return x + (1 + context_rank(self)) * dropout(y,")
    )
    with (tmp_path / "mine.py").open("a") as file:
        file.write(
            "\n\ndef context_rank(layer):\n    return 1e-9 * layer.context.tp.rank * "
            "(layer.name == 'layers.2')\n"
        )
    assert command(*arguments, "--layouts", "tp=2") == 1
    said = capfd.readouterr().out
    assert "arises in    forward: layers.2" in said
    assert "activation layers.2>out, step 1" in said
    assert ", on rank 1" in said, "rank 0 has the right one"
    page = (tmp_path / "run" / "parity.html").read_text()
    assert re.search(r'<li class="wrong first"[^>]*>layers.2&gt;out</li>', page)


def test_layouts_that_do_not_fit_are_not_tried_and_it_is_said_why() -> None:
    config = load_run(
        None, ["model.preset=llama-demo", "model.layers=3", *TRAIN, "train.global_batch=16"]
    )
    good, others = fitting_layouts(config, every(4), explicit=False)
    assert len(good) == 12
    ((layout, why),) = others
    assert layout.name == "pp=4"
    assert why == Problem.of("config.too_many_stages", pipeline="parallel.pipeline 4", layers=3)
    entries = [{"verdict": "proven"}, not_tried(layout, "float64", why)]
    assert entries[1]["verdict"] == "not tried"
    said = conclusion({"layouts": entries, "tensors": 1, "steps": 4, "applied": 3, "clipped": 3})
    assert said.startswith("all 1 comparisons agree")
    assert said.endswith("; 1 not tried")
    none = conclusion(
        {"layouts": entries[1:], "tensors": 1, "steps": 4, "applied": 3, "clipped": 3}
    )
    assert none.startswith("NOTHING is proven: none of 1 comparisons")


def test_a_layout_that_does_not_fit_is_told_for_what_no_key_left_out_would_mend() -> None:
    keys = ["parallel.tensor=2", "parallel.sequence=true", "parallel.async_tensor=true"]
    batches = ["train.global_batch=4", "train.micro_batch=2"]
    config = load_run(None, ["model.preset=llama-demo", *TRAIN, *batches, *keys])
    _, ((layout, why),) = fitting_layouts(config, [{"tensor": 2}, {"data": 4}], explicit=False)
    assert layout.name == "dp=4"
    assert shows(why, "config.global_batch")


def test_a_key_that_many_layouts_are_compared_without_is_told_once() -> None:
    without = {"precision": "float64", "left_out": ["async_tensor"], "quantities": {}}
    layouts = [{**without, "layout": name} for name in ("dp=2", "pp=2,dp=2")]
    ((part, reason),) = untried_parts({"not_tried": [], "layouts": layouts})
    assert part == "parallel.async_tensor"
    assert reason.startswith("dp=2; pp=2,dp=2 in float64: ")


def test_keys_that_a_layout_is_compared_without_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {
        "layout": "pp=2",
        "precision": "float64",
        "ranks": 2,
        "verdict": "proven",
        "left_out": ["cuts"],
    }
    entry["quantities"] = {
        "loss": {"verdict": "proven", "error": 1e-13, "bound": 1e-12, "failed": 0, "ratio": 1.0},
        "scaler": {"verdict": "proven", "error": 0.0, "bound": 0.0, "failed": 0, "ratio": "nan"},
        "moments": {"verdict": "not tried", "why": "the optimizer keeps no averages"},
    }
    counts = {"tensors": 1, "steps": 4, "applied": 3, "clipped": 3}
    made = {"verdict": "proven", "changes": {}, "not_tried": [], "layouts": [entry], **counts}
    show(made, Console(width=200))
    assert "not tried: parallel.cuts (pp=2 in float64: " in capsys.readouterr().out
    monkeypatch.setattr(doctor_layout, "certify", lambda *_: made)
    config = doctor_layout.own_run(2, 1, 1)
    found = doctor_layout.parity(config, "run.toml", tmp_path)
    assert found.message.endswith("; not tried with parallel.cuts, which the small run cannot have")
    assert found.facts["worst_of_bound"] == pytest.approx(0.1), "of the bound, not of the reference"


def test_what_rounding_hides_proves_nothing_and_is_not_called_proven() -> None:
    told = Difference("loss", "", 1, 1e-16, 1e-12)
    hidden = Difference("loss", "", 2, 1e-9, 1e-3, inconclusive="rounding")
    assert not hidden.fails
    assert not replace(hidden, error=1.0).fails, "nor is it called wrong"
    assert worst([told, hidden]) is told


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            (("self.scale = parameter(context, [whole], 0.0, partial=context.cut_sequence, "
                "mean=1.0)"),
             "self.scale = nn.Parameter(torch.ones(config.hidden))"),
            sentence("model.stage_parameter_layout", subject=re.compile(r"mine\.py:build"), without_layout="layers.0.scale", nor_others=", nor have 3 more"),
        ),
        (("def losses", "def loss"), sentence("model.last_stage_without_losses", subject=re.compile(": stage 0"))),
        (("def build", "def make"), sentence("megaprec.function_missing", named=re.compile(r"mine\.py"), location=re.compile(r"mine\.py"), name="build")),
        (("import torch\n", "import torch\nimport no_such\n"), sentence("megaprec.function_not_imported", named=re.compile(r"mine\.py"), location=re.compile(r"mine\.py"), kind=re.compile("^ModuleNotFound"))),
    ],
)  # fmt: skip
def test_what_a_model_of_ones_own_lacks_is_said_in_a_line(
    change: tuple[str, str], line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(*own_model(tmp_path, change)) == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert re.fullmatch(line, said[0]), said[0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["parallel.sequence=false", "--layouts", "tp=3"],
            "--layouts tp=3: " + sentence("config.tensor_sizes", tensor=3),
        ),
        (["--layouts", "tp2"], r'--layouts "tp2": no such key "tp2"; did you mean tp\?'),
        (["--layouts", "tp=2,pp=x"], r'--layouts "tp=2,pp=x": pipeline: must be a valid integer'),
        (["--steps", "0"], sentence("command.steps", steps=0)),
        (["--layouts", "dp=5"], "--layouts dp=5: " + sentence("config.global_batch", data=5)),
    ],
)
def test_bad_arguments_are_said_in_a_line(
    arguments: list[str], line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, *others = own_model(tmp_path)
    assert command(run, *others, *arguments) == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert re.fullmatch(line, said[0]), said[0]


# --- made small


@pytest.mark.parametrize("name", PRESETS)
def test_made_small_a_model_divides_as_it_did(name: str) -> None:
    config = load_run(None, [f"model.preset={name}", *TRAIN])
    model = config.model
    small = shrunk(config, LayoutLimits(4, 4, 4), steps=3).model
    assert (small.heads // small.kv_heads, small.family, small.tied) == (
        model.heads // model.kv_heads,
        model.family,
        model.tied,
    )
    sizes = [(model.heads, small.heads), (model.kv_heads, small.kv_heads), (model.ffn, small.ffn)]
    sizes += [(model.vocab or config.data.vocab_size, small.vocab)]
    for before, after in sizes:
        assert after <= before
        assert [after % d == 0 for d in (2, 3, 4)] == [before % d == 0 for d in (2, 3, 4)]
    assert num_parameters(small) < min(4_000_000, num_parameters(model.with_vocab(4096)))
    assert bool(small.window) == bool(model.window)
    assert (small.experts > small.experts_per_token) == (model.experts > model.experts_per_token)


@pytest.mark.parametrize("head_dim", [8, 10, 12, 14])
def test_made_small_heads_divide_the_features_where_they_did(head_dim: int) -> None:
    sizes = ["layers=2", "hidden=24", "heads=4", "kv_heads=2", "ffn=40"]
    sizes += ["family=llama", f"head_dim={head_dim}"]
    config = load_run(None, [*(f"model.{size}" for size in sizes), *TRAIN])
    for tensor in (1, 2, 4):
        small = shrunk(config, LayoutLimits(tensor, 1, 1), steps=3).model
        assert small.hidden % small.heads == 0


@pytest.mark.parametrize(
    ("given", "small"),
    [
        ([(0, 16), (100, 64), (500, 256)], [(0, 8), (8, 12), (20, 16)]),
        # of many changes the first ones and the last
        ([(0, 32), (9, 64), (99, 96), (999, 256)], [(0, 8), (8, 12), (20, 20)]),
        ([(0, 64), (100, 32), (200, 64)], [(0, 12), (12, 8), (20, 12)]),
    ],
)
def test_made_small_batches_that_change_do_so_with_each_of_the_first_steps(
    given: list[tuple[int, int]], small: list[tuple[int, int]]
) -> None:
    last = given[-1][1]
    words = [*TRAIN, "model.preset=llama-demo", "lr.unit=samples", f"train.global_batch={last}"]
    words += ["train.batch_schedule=" + str([[*change] for change in given])]
    made = shrunk(load_run(None, words), LayoutLimits(2, 2, 2), steps=3).train
    assert [*made.batch_schedule] == small
    assert made.global_batch == small[-1][1]


@pytest.mark.parametrize("full", [False, True])
def test_batches_and_lengths_that_no_compared_step_has_are_named_as_not_tried(full: bool) -> None:
    words = [*TRAIN, "model.preset=llama-demo", "lr.unit=samples", "train.seq_length=64"]
    words += ["train.batch_schedule=[[0,2],[10,4],[20,6],[30,12]]"]
    config = load_run(None, [*words, "train.seq_schedule=[[0, 16], [10, 32], [20, 64]]"])
    made = made_ready(config, LayoutLimits(1, 1, 1), full, 3, Path("unused"))
    named = dict(_uncovered_sizes(config, alone(made)))
    batches, lengths = ("1 of 4", "1 of 3") if full else ("3 of 4", "")
    assert named["other batches of train.batch_schedule"].endswith(batches)
    assert named.get("other lengths of train.seq_schedule", "").endswith(lengths)
    assert ("other lengths of train.seq_schedule" in named) == full


@pytest.mark.parametrize(
    ("lengths", "limits", "small"),
    [
        ([16, 32, 64], LayoutLimits(1, 1, 1), [4, 8, 16]),
        ([8, 64], LayoutLimits(1, 1, 1), [4, 16]),
        # each length is cut as the original
        ([16, 64], LayoutLimits(2, 1, 1, context=2), [4, 16]),
        ([32, 64], LayoutLimits(4, 1, 1, context=4), [16, 32]),
        ([24, 72], LayoutLimits(2, 1, 1), [8, 24]),
    ],
)
def test_made_small_lengths_that_change_are_cut_as_the_original(
    lengths: list[int], limits: LayoutLimits, small: list[int]
) -> None:
    changes = [[100 * number, length] for number, length in enumerate(lengths)]
    words = [*TRAIN, "model.preset=llama-demo", f"train.seq_length={lengths[-1]}"]
    config = load_run(None, [*words, f"train.seq_schedule={changes}"])
    made = shrunk(config, limits, steps=3).train
    assert [length for _, length in made.seq_schedule] == small
    assert made.seq_length == small[-1]


@pytest.mark.parametrize("groups", [1, 2])
def test_made_small_a_model_has_experts_for_all_ranks_that_they_are_spread_over(
    groups: int,
) -> None:
    router = f'{{score = "softmax", groups = {groups}}}'
    model = {"preset": "llama-demo", "experts": 24, "experts_per_token": 3, "router": router}
    config = load_run(None, [*(f"model.{key}={value}" for key, value in model.items()), *TRAIN])
    wanted = {1: 6, 2: 6, 3: 6, 4: 12, 8: 24}
    assert {
        n: shrunk(config, LayoutLimits(2, 2, 4, expert=n), steps=3).model.experts for n in wanted
    } == wanted
    own = config.model_copy(update={"parallel": config.parallel.model_copy(update={"expert": 4})})
    assert shrunk(own, LayoutLimits(2, 2, 4), steps=3).model.experts == 12


def test_made_small_a_model_keeps_mup_and_the_scale_of_its_scores() -> None:
    """With factors that are not 1, and widths that its base has."""
    sizes = ["preset=llama-demo", "ffn=384", "mup_base_hidden=32", "mup_base_head_dim=8"]
    config = load_run(None, [*(f"model.{size}" for size in sizes), *TRAIN])
    small = shrunk(config, LayoutLimits(4, 4, 4), steps=3).model
    assert small.mup.growth == 0.5
    assert small.attention_scalar == config.model.attention_scalar


def test_a_number_is_replaced_by_the_smallest_that_divides_alike() -> None:
    assert alike_size(50257, 61, 4) == 61
    assert alike_size(4096, 61, 4) == 64
    assert alike_size(12, 3, 4) == 12
    assert alike_size(5, 9, 4) == 5
