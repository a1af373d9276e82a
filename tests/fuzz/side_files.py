"""Groups of cases on what stands beside a run: measured speeds, conversations, prompts, schedules,
other systems' scripts and what a run has written of itself."""

import copy
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from megaprec.text.chat_template import CHATML
from tests.fuzz.mutate import (
    bytes_changed,
    edit_bytes,
    edit_json,
    json_changed,
    json_text,
    of_another_kind,
)
from tests.fuzz.mutated import GOOD
from tests.importing.scripts import GPT, LLAMA
from tests.importing.test_nemo import NEMO
from tests.importing.test_neox import NEOX
from tools.analysis.calibration.record import Calibration
from tools.console.toml import toml

TRAIN = ["train", "my.toml", "train.steps=5"]
FRESH = [*TRAIN, "train.folder=fresh"]
TIMES = {"forward": 0.001, "backward": 0.002}
SIZES = {"dtype": "float32", "threads": 1, "tokens": 64}
MEASURED: dict[str, Any] = {
    "version": 1,
    "device": "cpu",
    "machine": "a machine",
    "cores": 2,
    "ranks": 2,
    "process": 1 << 28,
    "torch": "2.13.0",
    "date": "2026-01-01",
    "products": [
        SIZES | {"inputs": 64, "outputs": 256, "forward": 1e-4, "input": 1e-4, "weight": 1e-4},
        SIZES | {"inputs": 512, "outputs": 512, "forward": 1e-3, "input": 1e-3, "weight": 1e-3},
    ],
    "attention": [SIZES | TIMES | {"heads": 4, "head_dim": 32}],
    "layers": [
        SIZES | TIMES | {"hidden": 16, "heads": 2, "ffn": 32},
        SIZES | TIMES | {"hidden": 128, "heads": 4, "ffn": 352},
    ],
    "loss": [SIZES | TIMES | {"vocab": 4096}],
    "memory": [{"threads": 1, "bytes": 1 << 24, "seconds": 0.01}],
    "collectives": [
        {"kind": "all-reduce", "ranks": 2, "bytes": 1 << 10, "seconds": 1e-4},
        {"kind": "all-reduce", "ranks": 2, "bytes": 1 << 20, "seconds": 1e-2},
    ],
}
ANSWERED = {"prompt": "a question", "completion": "an answer"}
MESSAGES = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": "an answer", "weight": 1},
]
CONVERSATIONS: list[dict[str, Any]] = [
    ANSWERED,
    {"messages": MESSAGES},
    {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "a"}}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": MESSAGES[:2], "completion": MESSAGES[2:]},
]
# what JSON's own writer does not write
ODD_ROWS = [b"5", b"null", b"[" * 5000, b'{"prompt": ' * 3000, b'{"prompt": NaN, "completion": 1}']
ODD_ROWS += [b'{"prompt": "a", "prompt": "b", "completion": "c"}', b'{"prompt":' + b"9" * 5000]
ODD_ROWS += [b'{"prompt": "\\ud800", "completion": "a"}', b'{"prompt": "a", "completion": ""}']
ODD_ROWS += [b'{"prompt": "' + b"a" * 1_000_000 + b'", "completion": "a"}', b"\xff\xfe", b""]
PIPELINE = ["--pipeline=2", "--microbatches=4"]
DEEPSPEED = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {"stage": 1},
}
YAML = """num_layers: 2
hidden_size: 64
num_attention_heads: 4
seq_length: 32
max_position_embeddings: 32
micro_batch_size: 1
global_batch_size: 8
train_iters: 20
lr: 1.0e-3
lr_warmup_fraction: .1
bf16: true
vocab_size: 300
data_path: [data/text]
"""
ODD_WORDS = ("", "A=$(", "$A$A", "${A:-" * 200, "((", "<<EOF", "if", "'", '"', "&x *x", "- " * 500)
LOGGED = ["metrics.jsonl", "events.jsonl", "run.toml", "run.resolved.toml", "yardsticks.json"]
READERS = (
    ["report", "run", "-o", "x.html"],
    ["compare", "run", "other", "-o", "x.png"],
    ["compare", "other", "run"],
    ["explain-overflow", "run"],
    ["explain-spike", "run"],
    ["diagnose", "run"],
    ["evaluate", "run"],
    ["plan", "my.toml", "--measured", "run"],
)


def toml_text(value: dict[str, Any]) -> str:
    """The TOML of a table with any values; what TOML has no word for is left as JSON writes it."""
    return "".join(f"{_key(name)} = {_toml(item)}\n" for name, item in value.items())


def _key(name: str) -> str:
    return json.dumps(name)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{_key(name)} = {_toml(item)}" for name, item in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool | int | float):
        return toml(value)
    return json.dumps(value)


def _extreme(rng: Random) -> dict[str, Any]:
    """The measurements with rows lost, or numbers as small or large as the file may have them."""
    measured = copy.deepcopy(MEASURED)
    for _ in range(rng.choice((1, 2, 8, 30))):
        rows = measured[rng.choice([name for name in measured if isinstance(measured[name], list)])]
        if rows and rng.random() < 0.1:
            rows.pop(rng.randrange(len(rows)))
        elif rows:
            row = rng.choice(rows)
            name = rng.choice([name for name in row if name not in ("dtype", "kind")])
            extremes = (1e-12, 1e6) if isinstance(row[name], float) else (1, 2, 1 << 31, 1 << 53)
            row[name] = rng.choice(extremes)
    for name in ("cores", "ranks", "process"):
        if rng.random() < 0.1:
            measured[name] = rng.choice((1, 1 << 53))
    return measured


def calibrations(rng: Random, folder: Path) -> list[str]:
    """A changed file of `megaprec calibrate`, read by a plan or at the start of a run."""
    file = folder / "calibration.toml"
    good = "\n".join(Calibration.model_validate(MEASURED).lines()).encode()
    kind = rng.randrange(12)
    if kind < 3:
        file.write_text(toml_text(_extreme(rng)))
    elif kind < 7:
        changed = json_changed(rng, MEASURED)
        table = changed if isinstance(changed, dict) else {"version": changed}
        content = toml_text(table).encode("utf-8", "surrogatepass")
        file.write_bytes(content)
    elif kind < 11:
        file.write_bytes(bytes_changed(rng, good))
    else:
        of_another_kind(rng, file)
    plan = ["plan", "my.toml", "--calibrated", "calibration.toml"]
    commands = (
        plan,
        [*plan, "--json"],
        [*plan, "--ranks=2"],
        [*plan, "model.experts=4", "model.experts_per_token=2"],
        [*plan, "precision.compute=bf16"],
        FRESH,
    )
    return [*rng.choice(commands)]


def _put_rows(rng: Random, file: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows, one to three of which are changed."""
    lines = [json.dumps(row).encode() for row in rows]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        odd = rng.choice(ODD_ROWS)
        changed = json_text(rng, json_changed(rng, rows[at % len(rows)]))
        lines[at] = odd if rng.random() < 0.3 else changed
    content = b"\n".join(lines)
    file.write_bytes(bytes_changed(rng, content) if rng.random() < 0.2 else content)


def conversations(rng: Random, folder: Path) -> list[str]:
    """Changed prompts with completions, and other conversations."""
    file = folder / "chats.jsonl"
    plain = rng.random() < 0.5
    rows = [ANSWERED] * 4 if plain else [rng.choice(CONVERSATIONS) for _ in range(4)]
    if rng.random() < 0.05:
        of_another_kind(rng, file)
    else:
        _put_rows(rng, file, rows)
    template = "plain" if plain else "chats.jinja"
    (folder / "chats.jinja").write_text(CHATML)
    if rng.random() < 0.2:
        edit_bytes(rng, folder / "chats.jinja")
    form = ["--chat-template", template]
    tokenizer = ["--tokenizer", "data/text.model" if plain else "hf/tokenizer.json"]
    build = ["data", "build", "chats.jsonl", "new", "--workers", "1", *form, *tokenizer]
    verify = ["data", "verify", "chats.jsonl", *form, *tokenizer]
    evaluate = ["evaluate", "run", "--data=chats.jsonl", "--text-field=completion"]
    train = [*FRESH, "data.source=chats.jsonl", f"data.chat_template={template}"]
    return [*rng.choice((build, build, verify, evaluate, train))]


def evaluated_texts(rng: Random, folder: Path) -> list[str]:
    """A changed text that a model is evaluated on, or prompts that it goes on with."""
    name = rng.choice(("text.jsonl", "text.jsonl.gz", "text.parquet", "short.txt"))
    file = folder / name
    if name == "text.jsonl":
        _put_rows(rng, file, [{"text": "some text"}, {"text": "more of it"}])
    elif rng.random() < 0.1:
        of_another_kind(rng, file)
    else:
        edit_bytes(rng, file)
    if name == "short.txt" and rng.random() < 0.5:
        return ["generate", "run", f"--prompts={name}", "--tokens=2"]
    model = rng.choice(("run", "hf"))
    return ["evaluate", model, f"--data={name}", "--max-chars=2000"]


def schedule_files(rng: Random, folder: Path) -> list[str]:
    """A changed schedule or timeline."""
    own = folder / "own.txt"
    timeline = folder / "timeline.json"
    changed = rng.choice((own, timeline))
    if rng.random() < 0.1:
        of_another_kind(rng, changed)
    elif changed == timeline:
        edit_json(rng, timeline)
    else:
        edit_bytes(rng, own)
    if changed == timeline:
        return ["schedule", *PIPELINE, "--measured=timeline.json", "-o", "x.svg"]
    pipeline = ["parallel.pipeline=2", "parallel.schedule_file=own.txt", "train.global_batch=4"]
    commands = (
        ["schedule", "--own=own.txt", "-o", "x.txt"],
        ["schedule", "my.toml", *pipeline],
        [*FRESH, *pipeline],
    )
    return [*rng.choice(commands)]


def imported(rng: Random, folder: Path) -> list[str]:
    """A changed launch script, YAML of arguments or configuration of DeepSpeed."""
    sources: dict[str, str] = {
        "gpt.sh": GPT,
        "llama.sh": LLAMA,
        "arguments.yaml": YAML,
        "deepspeed.json": json.dumps(DEEPSPEED),
        "neox.yml": NEOX,
        "nemo.yaml": NEMO,
    }
    name = rng.choice([*sources])
    for other, text in sources.items():
        (folder / other).write_text(text)
    file = folder / name
    if rng.random() < 0.1:
        of_another_kind(rng, file)
    elif file.suffix == ".json" and rng.random() < 0.8:
        edit_json(rng, file)
    else:
        _edit_lines(rng, file)
    items = ["arguments.yaml", name] if file.suffix == ".json" else [name]
    return ["import-args", *items, "--ranks=8"]


def _edit_lines(rng: Random, file: Path) -> None:
    """Change bytes of a script, or double, lose, exchange or nest its lines."""
    if rng.random() < 0.4:
        edit_bytes(rng, file)
        return
    lines = file.read_text().splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        line = lines[at]
        number = rng.choice(("-1", "9" * 500, "nan", "[]"))
        changed = (
            line * 2,
            line + rng.choice(ODD_WORDS),
            rng.choice(ODD_WORDS) + line,
            rng.choice(lines),
            f"{line.rpartition(' ')[0]} {number}",
            f"A=$A{line}",
        )
        lines[at] = rng.choice(changed)
    file.write_text("\n".join(lines), "utf-8")


def records(rng: Random, folder: Path) -> list[str]:
    """What a run has written of itself, changed, for the commands that read it."""
    shutil.copytree(folder / "run", folder / "other")
    file = folder / "run" / rng.choice(LOGGED)
    there = file.exists()
    if not there or rng.random() < 0.1:
        of_another_kind(rng, file)
    elif file.suffix == ".jsonl":
        lines = [line for line in file.read_bytes().splitlines() if line]
        at = rng.randrange(len(lines))
        lines[at] = json_text(rng, json_changed(rng, json.loads(lines[at])))
        if rng.random() < 0.3:
            lines[rng.randrange(len(lines))] = rng.choice(ODD_ROWS)
        file.write_bytes(b"\n".join(lines) + b"\n")
    elif file.suffix == ".json":
        edit_json(rng, file)
    else:
        edit_bytes(rng, file)
    return [*rng.choice(READERS)]


def described_folders(rng: Random, folder: Path) -> list[str]:
    """A folder of texts whose files a changed description lists."""
    texts = folder / "texts"
    texts.mkdir()
    for form in ("a.mds", "stream.arrow"):
        (texts / form).write_bytes(GOOD[form]())
    size = (texts / "a.mds").stat().st_size
    raw = {"basename": "a.mds", "bytes": size, "hashes": {}}
    descriptions: dict[str, Any] = {
        "state.json": {"_data_files": [{"filename": "stream.arrow"}], "_split": "train"},
        "index.json": {"version": 2, "shards": [{"version": 2, "format": "mds", "raw_data": raw}]},
        "dataset_dict.json": {"splits": ["train", "test"]},
    }
    name = rng.choice([*descriptions])
    (texts / name).write_text(json.dumps(descriptions[name]))
    if name == "state.json":
        (texts / "dataset_info.json").write_text("{}")
    if rng.random() < 0.1:
        of_another_kind(rng, texts / name)
    else:
        edit_json(rng, texts / name)
    tokenizer = ["--tokenizer", "data/text.model"]
    build = ["data", "build", "texts", "new", "--workers", "1", *tokenizer]
    return [*rng.choice((build, ["data", "verify", "texts"]))]


SIDE_GROUPS = (
    calibrations,
    conversations,
    evaluated_texts,
    schedule_files,
    imported,
    records,
    described_folders,
)
