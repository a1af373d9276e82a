"""`megaprec evaluate`: every token of a text is predicted once, as transformers and a plain model
predict it."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.reader import Store
from megaprec.errors import UserError
from megaprec.precision.plan import plan
from megaprec.text.build import prepare
from megaprec.text.sources import open_source
from megaprec.text.tokenizer import load_tokenizer
from megaprec.tokens.indexed import IndexedWriter
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from models.engine.relay import Relay
from parallel.context import Context
from tests import oracle
from tests.families import CASES, config_of
from tests.ranks import run_ranks
from tests.refusals import sentence, shows
from tests.runs import checkpoint, train, write_run
from tools.cli import main
from tools.commands import evaluate as command
from tools.inference.evaluation import Score, batches, score
from tools.inference.load import load_model, require_layout
from tools.inference.windows import TokenizedDocument, windows

TEXTS = [
    "the model learns",
    "über Öl — 数",
    "to say what it has seen in this text and 123 other 45 texts",
    "a",
]
POSITIONS = 16


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = write_run(tmp_path_factory.mktemp("runs"))
    assert train(file, "train.steps=3", "lr.peak=3e-2") == 0
    return checkpoint(file.parent / "run", 3)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


def evaluate(
    capsys: pytest.CaptureFixture[str], model: Path, *options: object, told: str = ""
) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["evaluate", str(model), "--json", *map(str, options)]) == 0
    printed = capsys.readouterr()
    assert told in printed.err
    return json.loads(printed.out)


def plain_nats(trained: Path, length: int, stride: int) -> tuple[float, int]:
    """The sum of the losses of all tokens, each from the tokens before it that its window holds;
    and their number."""
    store = Store(trained)
    tokenizer = load_tokenizer(trained / "text.model")
    config = ModelConfig(**store.index["model"])
    weights = {name: store.read("weight", name).double() for name in store.shapes("weight")}
    total = 0.0
    count = 0
    for text in TEXTS:
        assert tokenizer.eos is not None
        ids = [tokenizer.eos, *tokenizer.encode(text)]
        for at in range(1, len(ids)):
            window = 0 if at <= length else math.ceil((at - length) / stride)  # its number
            end = min(length + window * stride, len(ids) - 1)
            context = torch.tensor([ids[max(0, end - length) : at]])
            losses = oracle.logits(config, weights, context)[0, -1].log_softmax(-1)
            total = total - losses[ids[at]].item()
            count = count + 1
    return total, count


@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 3), (7, 7), (5, 1)])
def test_the_loss_is_that_of_a_plain_model_that_predicts_each_token_once(
    length: int, stride: int, trained: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nats, tokens = plain_nats(trained, length, stride)
    said = evaluate(
        capsys,
        trained,
        "--data",
        texts,
        "--window",
        length,
        "--stride",
        stride,
        "--compute",
        "fp64",
    )
    (one,) = said["sets"]
    size = sum(len(text.encode()) for text in TEXTS)
    assert (one["documents"], one["tokens"], one["bytes"]) == (len(TEXTS), tokens, size)
    expected = {
        "loss": nats / tokens,
        "perplexity": math.exp(nats / tokens),
        "bits_per_byte": nats / math.log(2) / size,
    }
    assert {key: one[key] for key in expected} == pytest.approx(expected, rel=1e-11, abs=0)


def test_the_yardstick_of_a_loss_is_what_the_frequencies_of_the_tokens_give(
    trained: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(trained / "text.model")
    tokens = [token for text in TEXTS for token in tokenizer.encode(text)]
    occurrences = Counter(tokens)
    expected = -sum(math.log(occurrences[token] / len(tokens)) for token in tokens) / len(tokens)
    for stride in (16, 3):  # each token counts once in any windows
        options = ("--window", 16, "--stride", stride)
        (one,) = evaluate(capsys, trained, "--data", texts, *options)["sets"]
        assert one["tokens"] == len(tokens)
        assert one["frequency_loss"] == pytest.approx(expected, rel=1e-12)
    assert main(["evaluate", str(trained), "--data", f"mine={texts}"]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "yardstick" in one]
    assert line.endswith(f": {expected:.4f} of mine")


@pytest.mark.slow
def test_a_hugging_face_folder_has_the_loss_that_transformers_computes(
    trained: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers: Any = pytest.importorskip(
        "transformers", reason="needs transformers: the extra hf"
    )
    folder = tmp_path / "hf"
    assert main(["convert", str(trained), str(folder), "--no-verify"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    total = 0.0
    count = 0
    short = [text for text in TEXTS if len(tokenizer(text).input_ids) <= POSITIONS]
    for text in short:
        ids = torch.tensor(
            [[tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]]
        )
        with torch.no_grad():
            total += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in short), encoding="utf-8")
    (one,) = evaluate(capsys, folder, "--data", texts)["sets"]
    assert one["tokens"] == count > 10
    assert one["loss"] == pytest.approx(total / count, rel=1e-6)
    assert evaluate(capsys, trained, "--data", texts)["sets"] == [one]


def test_text_and_the_tokens_that_it_was_built_into_have_one_score(
    trained: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(
        open_source(str(texts)), tmp_path / "tokens", tokenizer=trained / "text.model", workers=1
    )
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "folder" / f"{number}.txt").write_text(text, encoding="utf-8")
    given = (f"lines={texts}", f"built={tmp_path}/tokens", f"{tmp_path}/folder")
    sets = evaluate(capsys, trained, *(word for one in given for word in ("--data", one)))["sets"]
    assert [one.pop("name") for one in sets] == ["lines", "built", str(tmp_path / "folder")]
    assert [one.pop("source") for one in sets] == [
        str(texts),
        f"{tmp_path}/tokens",
        str(tmp_path / "folder"),
    ]
    assert sets[0] == sets[1] == sets[2]
    told = "note: --text-field body has no effect: all that is evaluated is tokens already"
    evaluate(capsys, trained, "--data", f"{tmp_path}/tokens", "--text-field", "body", told=told)


def test_a_begin_token_that_a_data_set_has_before_its_documents_is_no_text(
    trained: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron's tools write one where transformers' tokenizer does."""
    tokenizer = load_tokenizer(trained / "text.model")
    assert tokenizer.eos is not None
    with IndexedWriter(tmp_path / "tokens", tokenizer.vocab_size) as writer:
        for text in TEXTS:
            writer.add_document([tokenizer.eos, *tokenizer.encode(text), tokenizer.eos])
    lines, begun = evaluate(capsys, trained, "--data", texts, "--data", tmp_path / "tokens")["sets"]
    names = ("name", "source")
    assert {k: v for k, v in lines.items() if k not in names} == {
        k: v for k, v in begun.items() if k not in names
    }


def test_what_is_printed_is_what_json_says(
    trained: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = evaluate(capsys, trained, "--data", f"mine={texts}")["sets"]
    assert main(["evaluate", str(trained), "--data", f"mine={texts}"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "mine" in line).split()
    counts = [f"{one[key]:,}" for key in ("documents", "tokens", "bytes")]
    numbers = [f"{one['loss']:.4f}", f"{one['perplexity']:.4g}", f"{one['bits_per_byte']:.4f}"]
    assert row == ["mine", *counts, *numbers]


@pytest.mark.parametrize("length", [1, 2, 7, 16])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 15, 33])
def test_each_token_is_predicted_once_from_as_many_tokens_as_promised(
    length: int, size: int
) -> None:
    ids = np.arange(100, 100 + size)
    for stride in range(1, length + 1):
        for begin, expected in ((5, ids), (None, ids[1:])):
            cut = [*windows(ids, begin, length, stride)]
            assert [t for one in cut for t in one.targets[one.first :]] == expected.tolist()
            for number, one in enumerate(cut):
                assert len(one.tokens) == len(one.targets) <= length
                assert one.targets[:-1].tolist() == one.tokens[1:].tolist()
                assert one.first == 0 if number == 0 else one.first >= length - stride


@pytest.mark.parametrize("case", ["llama", "llama dynamic", "mixtral"])
@torch.no_grad()
def test_documents_of_all_lengths_in_one_batch_have_the_losses_of_each_alone(case: str) -> None:
    config = config_of(CASES[case])
    stage = Stage(config, Context(plan("fp64")), cuts(config, 1, POSITIONS)[0])
    lengths = [3, 20, 11, 1, 16, 11, 40]
    dice = np.random.default_rng(0)
    documents = [
        TokenizedDocument(dice.integers(config.vocab, size=length), length) for length in lengths
    ]
    total = 0.0
    for document in documents:
        for one in windows(document.ids, 0, 12, 5):
            logits = stage(torch.from_numpy(one.tokens)[:, None])[one.first :, 0]
            total += F.cross_entropy(
                logits, torch.from_numpy(one.targets[one.first :]), reduction="sum"
            ).item()
    told = list[int]()
    together = score(Relay.over(None, stage), documents, 0, 12, 5, told.append)
    assert (together.documents, together.tokens, together.size) == (
        len(lengths),
        sum(lengths),
        sum(lengths),
    )
    assert sum(told) == sum(lengths)
    assert together.nats == pytest.approx(total, rel=1e-12)


def score_on_rank(mesh: DeviceMesh, folder: Path, documents: list[TokenizedDocument]) -> Score:
    model = load_model(folder, Stage, "fp64", mesh=mesh)
    return score(Relay.over(mesh, model.stage), documents, 0, 12, 5, lambda _: None)


def test_a_model_has_one_score_in_every_layout(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.inference.evaluation.LOGITS", 330 * 30)
    dice = np.random.default_rng(0)
    documents = [
        TokenizedDocument(dice.integers(330, size=length), length)
        for length in (3, 20, 11, 1, 16, 11, 40)
    ]
    (alone,) = run_ranks(score_on_rank, {}, folder=trained, documents=documents)
    assert alone.tokens == 102
    for layout in ({"pp": 2, "tp": 2}, {"dp": 2}):
        for one in run_ranks(score_on_rank, layout, folder=trained, documents=documents):
            assert (one.documents, one.tokens, one.size) == (
                alone.documents,
                alone.tokens,
                alone.size,
            )
            assert one.nats == pytest.approx(alone.nats, rel=1e-12, abs=0)


def test_batches_hold_all_windows_and_no_more_tokens_than_allowed() -> None:
    cut = [one for size in (3, 9, 9, 30, 1, 12) for one in windows(np.arange(size), 0, 8, 4)]
    for same in (False, True):
        made = [*batches(cut, 20, same)]
        assert sorted(id(one) for batch in made for one in batch) == sorted(map(id, cut))
        for batch in made:
            lengths = {len(one.tokens) for one in batch}
            assert len(batch) == 1 or len(batch) * max(lengths) <= 20
            assert not same or len(lengths) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_local_ranks_print_what_one_process_prints(
    trained: Path, texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    assert main(["convert", str(trained), str(folder), "--no-verify"]) == 0
    for model in (trained, folder):
        said = []
        for layout in ((), ("--tensor", "2", "--pipeline", "2")):
            capfd.readouterr()
            assert (
                main(
                    [
                        "evaluate",
                        str(model),
                        "--data",
                        f"a={texts}",
                        "--compute",
                        "fp64",
                        "--json",
                        *layout,
                    ]
                )
                == 0
            )
            said.append(json.loads(capfd.readouterr().out))
        (one,), (other,) = (document.pop("sets") for document in said)
        assert said[0] == said[1]
        assert one.pop("name") == other.pop("name") and one.pop("source") == other.pop("source")
        assert one == pytest.approx(other, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "said"), [(3, 1, "--tensor 3 does not"), (1, 9, "--pipeline 9: the m")]
)
def test_a_layout_that_the_model_cannot_have_is_refused_by_the_options(
    tensor: int, pipeline: int, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        require_layout(config_of(CASES["llama"]), tensor, pipeline)


WRONG = {
    "--pipeline 0": "--pipeline 0: give 1 or more",
    "--window 17": re.escape(
        "--window 17: give 1 to 16, the positions of the model (model.max_positions)"
    ),
    "--window 0": re.escape("--window 0: give 1 to 16, the positions of the model"),
    "--stride 0": "--stride 0: give 1 to 16, the tokens of a window",
    "--window 4 --stride 5": "--stride 5: give 1 to 4, the tokens of a window",
    "--data nowhere.txt": sentence(
        "data.source_missing", name="nowhere.txt", folder=re.compile("^ in ")
    ),
    "--data a=": sentence("command.set_path_missing", option="a=", name="a"),
    "--data x.bin": sentence("text.data_set_prefix", path="x.bin", prefix="x"),
    "--max-chars 0": sentence("data.max_chars_zero", max_chars=0),
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_input_is_refused_by_name(
    options: str, trained: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(trained), "--data", f"mine={texts}", *options.split()]) == 2
    said = capsys.readouterr()
    assert re.match(WRONG[options], said.err) and said.err.count("\n") == 1 and not said.out
    assert (
        main(["evaluate", str(trained), "--data", f"mine={texts}", "--data", f"mine={texts}"]) == 2
    )
    assert shows(capsys.readouterr().err, "command.set_name_twice", name="mine")


BEFORE_RANKS = {
    "--tensor 3": "--tensor 3 does not divide the model's 4 heads",
    "--pipeline 9": "--pipeline 9: the model has 2 layers",
    "--tensor 2 --window 17": "--window 17: give 1 to 16",
    "--tensor 2 --data nowhere.txt": sentence(
        "data.source_missing", name="nowhere.txt", folder=re.compile("^ in ")
    ),
    "--tensor 2 --tokenizer nowhere.json": "nowhere.json: no such file",
    "--tensor 2 --ema": sentence("convert.no_ema"),
}


@pytest.mark.parametrize("options", BEFORE_RANKS)
def test_what_is_known_of_a_wrong_input_is_said_before_ranks_start(
    options: str,
    trained: Path,
    texts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = list[int]()
    monkeypatch.setattr(command, "run_local", lambda words, ranks: started.append(ranks))
    words = ["evaluate", str(trained), "--data", f"mine={texts}"]
    assert main([*words, *options.split()]) == 2 and not started
    said = capsys.readouterr()
    assert re.match(BEFORE_RANKS[options], said.err) and said.err.count("\n") == 1
    assert main([*words, "--tensor", "2"]) == 0 and started == [2]


@pytest.mark.parametrize("begin", [None, 5])
@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3)])
def test_of_a_data_set_with_a_loss_mask_each_token_that_counts_is_scored_once(
    begin: int | None, length: int, stride: int
) -> None:
    dice = np.random.default_rng(1)
    for size in (1, 2, 9, 40):
        ids = dice.integers(10, 99, size)
        counted = dice.random(size) < 0.5
        cut = [*windows(ids, begin, length, stride, counted)]
        scored = [t for one in cut for t in one.targets[one.counts].tolist()]
        is_predicted = np.arange(size) >= (begin is None)
        assert scored == ids[counted & is_predicted].tolist()
