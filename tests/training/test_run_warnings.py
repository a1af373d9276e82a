"""What is surely not meant is said before the first step, and a run that learned nothing does not
end as a good one."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.runs import train, write_run
from tools.config.run_file import load_run
from tools.training.corpus import Corpus, open_corpus
from tools.training.hangs import EARLIER, FOLDER
from tools.training.prepare import _require_trackers, prepare
from tools.training.run_warnings import run_warnings


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def corpus(run_file: Path) -> Corpus:
    return open_corpus(load_run(run_file))


@pytest.mark.parametrize(
    ("overrides", "begins"),
    [
        ([], None),
        (["train.steps=100000"], "{folder}/text.txt has "),
        (
            ["lr.warmup=6"],
            (
                "lr.warmup = 6 steps is the whole run, so the learning rate never reaches "
                "lr.peak = 0.01"
            ),
        ),
        (["lr.warmup=5"], None),
        (["lr.warmup=48", "lr.unit=samples"], "lr.warmup = 48 samples is the whole run"),
    ],
)
def test_keys_that_are_surely_not_meant_are_named(
    overrides: list[str], begins: str | None, run_file: Path, corpus: Corpus
) -> None:
    found = [*run_warnings(load_run(run_file, overrides), corpus, 1, "cpu")]
    assert len(found) == (begins is not None)
    assert begins is None or found[0].startswith(begins.format(folder=run_file.parent))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([], ""),
        (["train.eval_samples=1000"], "train.eval_samples = 1000 asks for 1,000 samples"),
        (["train.eval_batches=200"], "train.eval_batches = 200 of train.global_batch = 8 asks for"),
    ],
)
def test_an_evaluation_of_more_samples_than_there_are_is_named(
    asked: list[str], words: str, run_file: Path
) -> None:
    config = load_run(run_file, ["train.eval_every=3", *asked])
    found = [*run_warnings(config, open_corpus(config), 1, "cpu")]
    assert len(found) == len(asked)
    assert all(line.startswith(words) and "the held-out text has" in line for line in found)


NVFP4 = ["fp8.kind=nvfp4", "precision.compute=bf16"]
DELAYED = ["fp8.kind=delayed", "precision.compute=bf16", "train.steps=6"]


@pytest.mark.parametrize(
    ("overrides", "words", "said"),
    [
        (NVFP4, "fp8.kind = nvfp4 in all layers", True),
        ([*NVFP4, "fp8.first_layers=1"], "fp8.kind = nvfp4 in all layers", False),
        ([*NVFP4, "fp8.last_layers=1"], "fp8.kind = nvfp4 in all layers", False),
        ([*NVFP4, 'fp8.wide=["*.down.weight"]'], "fp8.kind = nvfp4 in all layers", False),
        (["fp8.kind=delayed", "precision.compute=bf16"], "fp8.kind = nvfp4 in all layers", False),
        ([*DELAYED, "fp8.calibrate=6"], "fp8.calibrate = 6 steps are the whole run", True),
        ([*DELAYED, "fp8.calibrate=5"], "fp8.calibrate", False),
    ],
    ids=str,
)
def test_each_setting_of_fp8_alone_is_named_or_takes_its_warning_away(
    overrides: list[str], words: str, said: bool, run_file: Path, corpus: Corpus
) -> None:
    found = [*run_warnings(load_run(run_file, overrides), corpus, 1, "cpu")]
    assert any(line.startswith(words) for line in found) == said


def test_every_warning_is_printed_before_the_run_begins(
    run_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tools.training.prepare.run_warnings", lambda *given: ["one", "another"])
    with ExitStack() as locks:
        prepare(load_run(run_file, [f"train.folder={tmp_path}/run"]), locks)
    said = capsys.readouterr().out.splitlines()
    assert "warning    one" in said
    assert "warning    another" in said


@pytest.mark.parametrize("key", ["train.global_batch={}", "train.batch_schedule=[[0,{}],[8,8]]"])
def test_a_batch_of_more_samples_than_there_are_is_named(
    key: str, run_file: Path, corpus: Corpus
) -> None:
    samples = len(corpus.train) // 4 * 4
    few = ["train.steps=2", "train.micro_batch=4"]
    assert not [*run_warnings(load_run(run_file, [*few, key.format(samples)]), corpus, 1, "cpu")]
    config = load_run(run_file, [*few, key.format(samples + 4)])
    (line,) = run_warnings(config, corpus, 1, "cpu")
    assert f"a batch takes {samples + 4}: it has some of them more than once" in line


@pytest.mark.parametrize(("vocab", "is_told"), [(512, True), (330, False)])
def test_an_export_names_ids_that_its_tokenizer_does_not_have(
    vocab: int, is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    keys = (f"model.vocab={vocab}", "train.steps=1", "--export-hf", str(tmp_path / "hf"))
    assert train(file, *keys) == 0
    said = capsys.readouterr().out
    assert ("ids from 330 on are no text" in " ".join(said.split())) == is_told


@pytest.mark.parametrize(
    ("groups", "taken", "best", "said"), [(1, 1, 1, True), (2, 2, 3, True), (2, 1, 1, False)]
)
def test_a_comparison_of_groups_that_are_all_taken_is_named(
    groups: int, taken: int, best: int, said: bool, run_file: Path, corpus: Corpus
) -> None:
    router = (
        f'model.router={{score="softmax", groups={groups}, groups_per_token={taken}, '
        f"group_best={best}}}"
    )
    config = load_run(run_file, ["model.experts=4", "model.experts_per_token=2", router])
    assert [
        line.startswith("model.router.group_best = ")
        for line in run_warnings(config, corpus, 1, "cpu")
    ] == [True] * said


@pytest.mark.parametrize(
    ("override", "tf32", "said"), [("1", False, True), ("0", True, True), ("1", True, False)]
)
def test_an_environment_that_overrules_tf32_on_gpus_is_named(
    override: str,
    tf32: bool,
    said: bool,
    run_file: Path,
    corpus: Corpus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    config = load_run(run_file, [f"precision.tf32={str(tf32).lower()}"])
    found = [*run_warnings(config, corpus, 1, "cuda")]
    assert [line.startswith(f"NVIDIA_TF32_OVERRIDE={override} ") for line in found] == [True] * said
    assert not [*run_warnings(config, corpus, 1, "cpu")]


def test_a_cpu_says_that_it_computes_fused_products_in_their_unfused_form(
    run_file: Path, corpus: Corpus
) -> None:
    keys = ["parallel.tensor=2", "parallel.sequence=true", "parallel.async_tensor=true"]
    config = load_run(run_file, keys)
    (said,) = run_warnings(config, corpus, 1, "cpu")
    assert said.startswith("parallel.async_tensor = true on a CPU: ")
    assert not [*run_warnings(config, corpus, 1, "cuda")]


def test_more_ranks_than_cores_are_said_of_cpus_only(run_file: Path, corpus: Corpus) -> None:
    config = load_run(run_file)
    (said,) = run_warnings(config, corpus, 1000, "cpu")
    assert said.startswith("1000 ranks share ")
    assert not [*run_warnings(config, corpus, 1000, "cuda")]


@pytest.mark.parametrize(
    ("overrides", "begins"),
    [
        ([], []),
        (["model.vocab=331", "data.vocab_size=4096"], []),
        (
            ["data.max_chars=9"],
            ["data.max_chars = 9 has no effect on {tokens}: it is tokens, not text"],
        ),
        (
            ["data.text_field=body"],
            ['data.text_field = "body" has no effect on {tokens}: it is tokens, not text'],
        ),
        (["data.text_field=body", 'data.validation=[{{name="a", source="{text}"}}]'], []),
        (
            ["data.vocab_size=331"],
            ["data.vocab_size = 331 has no effect: no tokenizer is trained; ids are below"],
        ),
        (
            [
                'data.blend=[{{source="{text}", weight=1}}, {{source="{tokens}", weight=1}}]',
                "data.max_chars=900",
            ],
            ["data.max_chars = 900 has no effect on {tokens}: it is"],
        ),
    ],
)
def test_keys_of_texts_that_have_no_effect_on_tokens_are_named(
    overrides: list[str], begins: list[str], run_file: Path, corpus: Corpus, tmp_path: Path
) -> None:
    names = {"tokens": corpus.datasets[0].prefix, "text": run_file.parent / "text.txt"}
    blended = "blend" in str(overrides)
    if blended:
        own = ["data.source=python", f"data.cache={tmp_path}"]
    else:
        own = [f"data.source={names['tokens']}"]
    config = load_run(run_file, [*own, *(one.format(**names) for one in overrides)])
    found = [*run_warnings(config, open_corpus(config) if blended else corpus, 1, "cpu")]
    assert len(found) == len(begins)
    assert all(
        line.startswith(one.format(**names)) for line, one in zip(found, begins, strict=True)
    )


@pytest.mark.parametrize("copies", [0, 3])
def test_held_out_documents_that_are_trained_on_are_counted(copies: int, tmp_path: Path) -> None:
    run_file = write_run(tmp_path)
    words = [" ".join(f"{number}{word}" for word in "abcdefghij") for number in range(100)]
    texts = [*words, *words[:copies]]
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    own = [f"data.source={tmp_path}/text.jsonl", f"data.cache={tmp_path}/x", "data.vocab_size=280"]
    own.append("data.held_out_from=end")
    config = load_run(run_file, [*own, "train.eval_every=1"])
    found = [*run_warnings(config, open_corpus(config), 1, "cpu")]
    assert len(found) == bool(copies)
    assert not copies or found[0].startswith(f"data.held_out: {copies} of ")


@pytest.mark.parametrize("ending", ["jsonl", "txt"])
@pytest.mark.parametrize("known", [0, 2])
def test_documents_of_a_named_set_that_are_trained_on_are_counted(
    known: int, ending: str, tmp_path: Path
) -> None:
    """Also one that is the whole training text, of which a part is held out."""
    run_file = write_run(tmp_path)
    words = [" ".join(f"{number}{word}" for word in "abcdefghij") for number in range(100)]
    kept = words[:known] + [f"quite {text}" for text in words[known:5]]
    if ending == "txt":
        kept = words if known else kept
    for name, texts in {"text": words, "named": kept}.items():
        lines = (json.dumps({"text": text}) if ending == "jsonl" else text for text in texts)
        (tmp_path / f"{name}.{ending}").write_text("".join(f"{line}\n" for line in lines))
    own = [
        f"data.source={tmp_path}/text.{ending}",
        f"data.cache={tmp_path}/x",
        "data.vocab_size=280",
    ]
    named = f'data.validation=[{{name = "named", source = "{tmp_path}/named.{ending}"}}]'
    config = load_run(run_file, [*own, named, "train.eval_every=1"])
    found = [*run_warnings(config, open_corpus(config), 1, "cpu")]
    count = "2 of 5" if ending == "jsonl" else "1 of 1"
    assert [line.partition(" are in")[0] for line in found] == [
        f"data.validation: {count} documents of named"
    ] * (known > 0)


@pytest.mark.slow
def test_a_run_of_which_no_step_was_applied_ends_with_code_3_and_keeps_its_state(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = [
        "precision.compute=fp16",
        "precision.loss_scale=1e30",
        "train.steps=2",
        "precision.patience=100",
    ]
    assert train(run_file, *constant, f"train.folder={tmp_path}") == 3
    said = capsys.readouterr()
    assert "all 2 steps were skipped and nothing was learned: " in said.err
    assert "Traceback" not in said.err
    assert (tmp_path / "checkpoints" / "step_00000002").is_dir()


def test_trackers_are_required_if_a_run_names_some(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    required: list[object] = []
    monkeypatch.setattr("tools.training.prepare.optional_parts.require_trackers", required.append)
    _require_trackers(load_run(run_file))
    assert required == []
    _require_trackers(load_run(run_file, ['log.to=["tensorboard"]']))
    assert [list(names) for names in required] == [["tensorboard"]]  # type: ignore[call-overload]


def test_records_of_the_end_before_are_put_aside_before_a_run_begins(
    run_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / FOLDER).mkdir(parents=True)
    (run / FOLDER / "rank").write_text("of the run before")
    with ExitStack() as locks:
        prepare(load_run(run_file, [f"train.folder={run}"]), locks)
    assert not (run / FOLDER).exists()
    assert (run / EARLIER / "rank").read_text() == "of the run before"


@pytest.mark.parametrize(("asked", "threads"), [(3, 3), (0, 7)])
def test_a_rank_takes_the_threads_that_are_asked_for_or_its_share_of_the_cores(
    asked: int, threads: int, run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.training.rank.share_of_cores", lambda ranks: 7 * ranks)
    taken: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", taken.append)
    words = [f"train.folder={tmp_path}/run", f"train.threads={asked}", "train.steps=1"]
    assert train(run_file, *words) == 0
    assert taken[0] == threads
