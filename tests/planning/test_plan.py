"""`megaprec plan`: what is told is what a run would hold, and the best layout is a run that can be
trained."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.text.training import train_sentencepiece
from models.estimate.gpus import gpu_named
from parallel.pipeline.kinds import KINDS
from tests.commands.test_schedule_command import run_file as run_file
from tests.refusals import sentence
from tests.runs import train
from tools.analysis.planning.device import target_of
from tools.analysis.planning.memory import (
    MemoryModel,
    least_activation_bytes,
)
from tools.analysis.planning.search import (
    Planned,
    candidates,
    least_bytes,
    least_bytes_of_fullest,
    plan_run,
    search,
)
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.speed import least_seconds, least_seconds_of_schedule, passes_of
from tools.cli import main
from tools.commands.plan import NOTHING_FITS
from tools.config import run_file as run_file_module
from tools.config.run_file import RunConfig, load_run
from tools.config.tables.native_keys import plan_of

RUN = """
[model]
family = "llama"
layers = 8
hidden = 64
heads = 8
ffn = 128
vocab = 512
[data]
vocab_size = 512
[train]
steps = 10
global_batch = 16
micro_batch = 1
seq_length = 32
folder = "{folder}"
"""
ASSUMED = Assumptions(100, 0.5, 100, 10, 8)

# of a GPU that has room for NCCL's buffers of one or two groups of ranks, beside a tiny model
FEW_GROUPS = "750MB"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder=tmp_path / "run"))
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["plan", *map(str, arguments)]) in (0, NOTHING_FITS)
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["plan", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def data(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    return json.loads(said(capsys, *arguments, "--json"))


@pytest.mark.parametrize("named", [True, False])
def test_a_plan_has_the_vocabulary_of_the_tokenizer_that_is_there(
    named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"text {number} of a few words" for number in range(200)]
    tokenizer = train_sentencepiece(texts, tmp_path / "tokens", 290, False)
    file = tmp_path / "run.toml"
    source = "text.txt" if named else tmp_path / "tokens"
    (tmp_path / "tokens.bin").touch()
    (tmp_path / "tokens.idx").touch()
    lines = [
        "[model]\nlayers = 2\nhidden = 64\nheads = 4",
        f'[data]\nsource = "{source}"',
        f'tokenizer = "{tokenizer}"' if named else "",
        "[train]\nsteps = 10\nglobal_batch = 4\nmicro_batch = 1\nseq_length = 64",
    ]
    file.write_text("\n".join(lines))
    said: list[str] = []
    for more in ([], ["model.vocab=290"]):
        assert main(["plan", str(file), *more]) == 0
        said.append(capsys.readouterr().out)
    # what is not timed
    sizes = ("parameters", "KiB", "MiB")
    left_open, given = (
        [line for line in text.splitlines() if any(size in line for size in sizes)] for text in said
    )
    assert left_open
    assert left_open == given
    assert f"{tokenizer} has 290 tokens" in " ".join(said[0].split())


def test_the_verdict_follows_from_the_memory(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    total = data(capsys, file, "--gpu", "H100")["total"]
    for memory, verdict in ((total / 0.94, "fits"), (total / 0.96, "does not fit")):
        assert data(capsys, file, "--gpu-memory", f"{memory:.0f}")["verdict"] == verdict
    assert "verdict    fits: " in said(capsys, file, "--gpu", "A100")
    unknown = said(capsys, file, "train.device=cuda")
    assert "not known" in unknown and "prediction not known" in unknown


def test_zero_2_fits_llama_3_8b_into_eight_gpus_of_80_gb(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "large.toml"
    text = f"""
[model]
preset = "llama-3-8b"
[precision]
compute = "bf16"
[data]
vocab_size = 128256
[train]
steps = 10
global_batch = 64
micro_batch = 1
seq_length = 8192
folder = "{tmp_path / "run"}"
[parallel]
data = 8
"""
    path.write_text(text)
    whole = data(capsys, path, "--gpu", "H100")
    sharded = data(capsys, path, "parallel.zero=2", "--gpu", "H100")
    assert (whole["verdict"], sharded["verdict"]) == ("does not fit", "fits")
    (before,), (after,) = whole["ranks"], sharded["ranks"]
    assert after["gradients"] == before["gradients"] / 8
    assert before["arriving"] == 0 and 0 < after["arriving"] < before["gradients"] / 8
    sent = [one["prediction"]["traffic"]["dp"] for one in (whole, sharded)]
    # in each of eight micro-batches, beside the weights
    assert sent[0] * 4 < sent[1] < sent[0] * 8


def test_zero_3_shards_weights_too_and_counts_those_that_are_whole_meanwhile(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each half of them, in the layers that compute, in those that come next, and in kept ones."""
    layout = [file, "parallel.data=2", "precision.compute=bf16", "--gpu", "H100"]

    def planned(*keys: str) -> dict[str, int]:
        (rank,) = data(capsys, *layout, *keys)["ranks"]
        return rank

    whole = planned("parallel.zero=2")
    sharded = planned("parallel.zero=3", "parallel.overlap=false")
    ahead = planned("parallel.zero=3")
    kept = planned("parallel.zero=3", "parallel.zero_keep=99")
    assert whole["gathered"] == 0
    assert sharded["weights"] == pytest.approx(whole["weights"] / 2, rel=0.01)
    assert sharded["masters"] == pytest.approx(whole["masters"], rel=0.01)
    assert 0 < sharded["gathered"] < ahead["gathered"] < kept["gathered"]
    assert kept["gathered"] <= whole["weights"] * 1.01
    text = " ".join(said(capsys, *layout, "parallel.zero=3").split())
    assert "ZeRO-3" in text and "whole weights of layers that compute " in text


def test_kept_layers_are_named_with_the_stage_of_zero(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or two layouts of a search would look alike, and differ in bytes and seconds."""
    layout = [file, "parallel.data=4", "parallel.zero=3", "parallel.zero_keep=2", "--gpu", "H100"]
    own, layouts = said(capsys, *layout, "--ranks", 4).split("layouts of 4 ranks")
    assert "ZeRO-3, 2 layers kept" in " ".join(own.split())
    assert " 3, 2 kept " in layouts
    one = [key.replace("keep=2", "keep=1") for key in map(str, layout)]
    assert "ZeRO-3, 1 layer kept" in " ".join(said(capsys, *one).split())


def test_a_room_keeps_the_layers_that_fit_into_it_to_the_byte(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = [file, "model.layers=8", "parallel.data=2", "parallel.zero=3", "--gpu", "H100"]

    def gathered(keep: object) -> int:
        (rank,) = data(capsys, *layout, f"parallel.zero_keep={keep}")["ranks"]
        return rank["gathered"]

    one, two, all_layers = gathered(1), gathered(2), gathered(99)
    layer = two - one
    assert one < two < all_layers
    assert gathered(f'"{2 * layer / 1000}KB"') == two
    assert gathered(f'"{(2 * layer - 1) / 1000}KB"') == one
    assert gathered('"1TB"') == all_layers
    assert "ZeRO-3, layers of 1TB kept" in " ".join(
        said(capsys, *layout, 'parallel.zero_keep="1TB"').split()
    )


@pytest.mark.parametrize("kind", ["current", "mx"])
def test_casts_of_weights_do_not_stay_under_zero_3(
    kind: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank has no room for those of all weights: they are made where they are used."""
    in_fp8 = [f"fp8.kind={kind}", "fp8.pad=true"]
    layout = [file, "precision.compute=bf16", "parallel.data=2", "--gpu", "B200"]
    casts, without, plain = (
        data(capsys, *layout, *keys)["ranks"][0]["buffers"]
        for keys in (
            ["parallel.zero=2", *in_fp8],
            ["parallel.zero=3", *in_fp8],
            ["parallel.zero=3"],
        )
    )
    assert casts > without == plain


def test_kinds_add_up_and_logits_are_activations(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = data(
        capsys,
        file,
        "parallel.pipeline=2",
        "parallel.tensor=2",
        "precision.compute=bf16",
        "--gpu",
        "H100",
    )
    for rank in plan["ranks"]:
        logits = rank.pop("logits")
        total = rank.pop("total")
        assert sum(rank.values()) == total and logits < rank["activations"]
    assert plan["total"] == max(sum(rank.values()) for rank in plan["ranks"])
    assert all(
        2 * rank["weights"] == rank["gradients"] == rank["masters"] for rank in plan["ranks"]
    )


def test_what_fits_nothing_has_an_exit_code_of_its_own(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["plan", str(file), "--gpu-memory", "1MB", "--tflops", "9"]
    best = tmp_path / "best.toml"
    assert main(small) == NOTHING_FITS
    assert "does not fit" in capsys.readouterr().out
    assert main([*small, "--json"]) == NOTHING_FITS
    capsys.readouterr()
    assert main([*small, "--ranks", "2", "-o", str(best)]) == NOTHING_FITS
    *_, reason, written = capsys.readouterr().out.splitlines()
    assert reason.startswith("no layout of 2 ranks fits: the smallest of ")
    assert written == f"not written {best}" and not best.exists()
    assert main(["plan", str(file), "--gpu", "H100", "--ranks", "2"]) == 0


def test_layouts_of_other_ranks_than_the_run_has_do_not_begin_with_its_own(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "bytes of a rank, by pipeline rank"
    assert own not in said(capsys, file, "--gpu", "H100", "--ranks", "2")
    assert own in said(capsys, file, "--gpu", "H100", "--ranks", "1")


@pytest.mark.slow
def test_lines_fit_80_columns(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, file, "parallel.pipeline=2", "--gpu", "H100", "--ranks", 2)
    assert max(map(len, text.splitlines())) <= 80, [
        line for line in text.splitlines() if len(line) > 80
    ]


def test_neither_data_nor_a_tokenizer_is_needed(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ("data.source=there/is/none", "data.tokenizer=none.json")
    assert "model.vocab" not in said(capsys, file, *missing, "--gpu", "H100")
    assert "planned for data.vocab_size = 512" in said(
        capsys, file, *missing, "model.vocab=0", "--gpu", "H100"
    )


@pytest.mark.slow
def test_the_best_layout_is_one_that_trains(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = tmp_path / "best.toml"
    text = said(
        capsys, run_file, f"train.folder={tmp_path}/run", "--gpu", "H100", "--ranks", 1, "-o", best
    )
    assert f"written    {best}" in text
    assert load_run(best).world_size == 1
    assert train(best) == 0
    assert capsys.readouterr().out.startswith("plan       ")


@pytest.mark.slow
def test_the_layouts_found_are_the_fastest_that_fit(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a search without any shortcut."""
    config = load_run(file)
    target = target_of(load_run(file), memory=FEW_GROUPS)
    memory = MemoryModel("cuda")
    every = [plan_run(one, memory, ASSUMED) for one in candidates(config, 2, 8)]
    fitting = [one for one in every if target.verdict(one.total) == "fits"]
    times = sorted(one.prediction.seconds for one in fitting if one.prediction)
    assert 0 < len(fitting) < len(every)
    options = (
        "--tflops",
        100,
        "--fast-link",
        100,
        "--slow-link",
        10,
        "--gpu-memory",
        FEW_GROUPS,
        "--ranks",
        2,
    )
    found = data(capsys, file, *options)
    found_times = [one["prediction"]["seconds"] for one in found["layouts"]]
    # other micro-batches and ZeRO stages of the fastest are tried too
    for found_time, time in zip(found_times, times, strict=False):
        assert found_time <= time * (1 + 1e-9)
    assert len(found["layouts"]) + found["slower"] + found["too_large"] >= len(every)
    assert all(one["verdict"] == "fits" for one in found["layouts"])


SPLIT = [name for name, kind in KINDS.items() if kind.splits_backward]


def every_kind(file: Path) -> Iterator[tuple[str, ...]]:
    for kind in ("gpipe", "1f1b", "interleaved"):
        yield f"parallel.schedule={kind}", "parallel.pipeline=4"
        yield (
            f"parallel.schedule={kind}",
            "parallel.pipeline=2",
            "parallel.tensor=2",
            "parallel.sequence=true",
        )
        yield (
            f"parallel.schedule={kind}",
            "parallel.pipeline=2",
            "parallel.data=2",
            "parallel.zero=3",
        )


def least_of_fullest(config: RunConfig) -> int:
    """The bound of the fullest rank."""
    return least_bytes_of_fullest(config, passes_of(config), MemoryModel("cuda"))


@pytest.mark.slow
def test_bounds_by_which_layouts_are_left_out_hold(file: Path) -> None:
    for overrides in every_kind(file):
        config = load_run(file, overrides)
        planned = plan_run(config, MemoryModel("cuda"), ASSUMED)
        assert planned.prediction is not None
        least_activations = MemoryModel("cuda").least_activations(config)
        assert least_activation_bytes(config) <= least_activations
        assert (least_activations == 0) == ("gpipe" in overrides[0])
        assert least_bytes(config) + least_activations <= planned.total
        assert least_of_fullest(config) <= planned.total
        assert least_seconds(config, ASSUMED) <= planned.prediction.seconds * (1 + 1e-9), overrides
        by_schedule = least_seconds_of_schedule(config, passes_of(config), ASSUMED)
        assert by_schedule <= planned.prediction.seconds * (1 + 1e-9), overrides


def test_a_part_of_a_long_schedule_stands_for_all_of_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = [(f"parallel.schedule={kind}", "parallel.pipeline=4") for kind in SPLIT]
    for overrides in [*every_kind(file), *halves]:
        config = load_run(file, (*overrides, "train.global_batch=64"))
        whole = plan_run(config, MemoryModel("cuda"), ASSUMED)
        monkeypatch.setattr("tools.analysis.planning.speed.MOST_SIMULATED", 0)
        assert passes_of(config).more > 0
        part = plan_run(config, MemoryModel("cuda"), ASSUMED)
        monkeypatch.undo()
        assert part.prediction is not None and whole.prediction is not None
        assert part.prediction.seconds == pytest.approx(whole.prediction.seconds, rel=0.02), (
            overrides
        )
        assert part.total == pytest.approx(whole.total, rel=0.01), overrides


def test_the_precision_of_a_run_is_worked_out_once_for_all_its_instructions(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def counted(*tables: Any) -> Any:
        made.append(tables)
        return plan_of(*tables)

    monkeypatch.setattr(run_file_module, "plan_of", counted)
    config = load_run(
        file, ["parallel.pipeline=4", "precision.compute=bf16", "precision.min_scale=2.0"]
    )
    assert plan_run(config, MemoryModel("cuda"), ASSUMED).prediction
    assert config.plan.compute == torch.bfloat16 and len(made) <= 2
    wide = config.model_copy(update={"precision": load_run(file).precision})
    assert wide.plan.compute == torch.float32


def test_products_alone_take_the_time_of_their_flops(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank, nothing recomputed: MFU is the efficiency that was assumed, less the lookup of the
    embedding and the scores that the backward pass of attention computes again."""
    plan = data(capsys, file, "--tflops", 1, "--efficiency", 0.25)
    assert 0.245 < plan["prediction"]["mfu"] < 0.25
    assert plan["prediction"]["idle"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("h100", "H100"),
    ],
)
def test_a_gpu_is_known_by_its_name_or_not_at_all(name: str, found: str | None) -> None:
    gpu = gpu_named(name)
    assert (gpu.name if gpu else None) == found


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--gpu", "H1000"), sentence("planning.gpu_unknown", name="H1000")),
        (("--gpu-memory", "much"), sentence("planning.gpu_memory_form", text="much")),
        (("--efficiency", "2"), "--efficiency 2: give a fraction"),
        (("--tflops", "-1"), "--tflops -1: give a number above 0"),
        (("--ranks", "-4"), "--ranks -4: give a number from 1"),
        (("--ranks", "0"), "--ranks 0: give a number from 1"),
        (
            ("--gpu-memory", "80"),
            sentence("planning.gpu_memory_unit", text=80, number=80),
        ),
        (
            ("-o", "best.toml"),
            re.escape("--output best.toml: the best of which layouts? give --ranks N"),
        ),
        (("train.device=cuda", "--ranks", "4"), sentence("command.peak_unknown")),
        (("model.factory=my.py:build",), "model.factory"),
        (
            ("--gpu", "H100", "--ranks", "11", "-o", "b.toml"),
            "11 ranks have no layout: pipeline is at most",
        ),
        (("--gpu", "H100", "--ranks", "1000003"), "1,000,003 ranks have no layout"),
        (("--gpu", "H100", "--budget", "-1"), "--budget -1: give a number of rank-hours"),
        (("--gpu", "H100", "--measured", "no"), sentence("planning.measured_no_run", folder="no")),
    ],
)
def test_what_is_wrong_is_told(
    file: Path, options: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(capsys, file, *options)
    assert re.search(problem, text) and re.search("Traceback", text) is None


@pytest.mark.slow
def test_ranks_that_share_this_machine_have_together_what_one_process_has(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ranks the run file itself has."""
    monkeypatch.setattr("tools.commands.plan._measure_tflops", lambda config: 0.6)
    monkeypatch.setattr("tools.analysis.planning.device.memory_bytes", lambda: 12 << 30)
    few = ("train.device=cpu", "model.layers=2", "train.global_batch=4")  # layouts
    alone = data(capsys, file, *few)
    shared = data(capsys, file, *few, "parallel.data=2", "--ranks", 4)["layouts"]
    assert (
        min(one["prediction"]["seconds"] for one in shared) >= alone["prediction"]["seconds"] * 0.99
    )
    text = said(capsys, file, *few, "--ranks", 4)
    assert "12.0 GiB over 4 ranks: 3.00 GiB, 150 GFLOP/s" in text


def test_a_canonical_run_is_planned_with_the_sums_that_wait_and_is_told_that_its_times_are_those_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight micro-batches add up in a tree of three levels, so three more gradients wait; replicas
    receive one more."""
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(folder=tmp_path / "run"))
    canonical = [
        'train.numerics="canonical"',
        "train.canonical_shards=2",
        "train.threads=1",
        "train.micro_batch=1",
    ]
    assert main(["plan", str(file), *canonical, "--gpu", "H100"]) == 0
    assert 'times are those of train.numerics = "fast"' in " ".join(capsys.readouterr().out.split())
    for replicas, waiting, arriving in (1, 3, 0), (2, 2, 1):
        layout = f"parallel.data={replicas}", "train.global_batch=8", "--gpu", "H100"
        (plain,), (own,) = (
            data(capsys, file, *run, *layout)["ranks"] for run in (canonical[2:], canonical)
        )
        assert own["sums"] == pytest.approx(waiting * plain["gradients"], rel=0.02), (
            "norms are there twice"
        )
        assert own["communication"] == pytest.approx(arriving * plain["gradients"], rel=0.02)


def test_in_a_terminal_no_line_of_a_plan_is_longer_than_the_terminal_is_wide(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = [f"parallel.{axis}=2" for axis in ("tensor", "pipeline", "data")]
    whole = said(capsys, file, *layout, "--gpu", "H100")
    assert max(map(len, whole.splitlines())) > 80
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    broken = said(capsys, file, *layout, "--gpu", "H100")
    assert max(map(len, broken.splitlines())) <= 80
    assert broken.split() == whole.split()


def test_a_file_that_the_command_did_not_write_is_not_overwritten(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = tmp_path / "best.toml"
    best.write_text("[train]\nsteps = 7\n")
    assert main(["plan", str(run_file), "--gpu", "H100", "--ranks", "1", "-o", str(best)]) == 2
    line = f"--output {best}: it exists, and `megaprec plan` did not write it: give another name"
    assert capsys.readouterr().err.splitlines() == [line]
    assert best.read_text() == "[train]\nsteps = 7\n"
    best.unlink()
    for _ in range(2):
        assert main(["plan", str(run_file), "--gpu", "H100", "--ranks", "1", "-o", str(best)]) == 0


@pytest.mark.slow
def test_what_a_prediction_leaves_out_is_said_in_lines_and_in_json(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--tflops", 1, "--gpu-memory", "80GB")
    fp8 = ("precision.compute=bf16", "fp8.kind=current", "fp8.pad=true")
    for keys, said in (
        (fp8, "the peak of FP8 is not known"),
        (("train.device=cpu",), 'train.device = "cpu" is left aside'),
    ):
        notes = data(capsys, file, *keys, *options)["notes"]
        assert any(said in note for note in notes)
        assert not any(said in note for note in data(capsys, file, *options)["notes"])


def test_ctrl_c_ends_a_search_with_what_was_found(file: Path) -> None:
    config = load_run(file).on_device("cuda")
    target = target_of(config, "H100")
    press = signal.getsignal(signal.SIGINT)

    def press_at_third(number: int, total: int, best: Planned | None) -> None:
        if number == 3:
            signal.raise_signal(signal.SIGINT)

    found = search(config, 8, target, ASSUMED, press_at_third)
    assert len(found.layouts) == 3 and found.unseen > 0
    assert signal.getsignal(signal.SIGINT) is press

    def press_at_first(number: int, total: int, best: Planned | None) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        search(config, 8, target, ASSUMED, press_at_first)


@pytest.mark.parametrize(
    ("name", "option"),
    [("Adam", "betas=[0.9, 0.95]"), ("muon", "ns_coefficients=[3.4445, -4.775, 2.0315]")],
)
def test_options_of_a_rule_may_be_lists(name: str, option: str) -> None:
    """As TOML has them."""
    keys = [
        'model.preset="llama-demo"',
        "model.vocab=4096",
        "train.steps=1",
        "train.global_batch=2",
    ]
    keys += ["train.micro_batch=1", "train.seq_length=16", f"optimizer.name={name}"]
    config = load_run(None, [*keys, f"optimizer.options={{{option}}}"])
    assert plan_run(config, MemoryModel("cpu"), None).total > 0


def test_times_of_frozen_parameters_are_said_to_be_those_of_trained_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, "examples/demo.toml", 'optimizer.frozen=["embedding.*"]')
    assert "optimizer.frozen: times are those of a run that trains all parameters" in text
    assert "optimizer.frozen" not in said(capsys, "examples/demo.toml")
