"""The groups of cases: each is a function that changes the copy of the good files and returns the
command line."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch

from megaprec.checkpoint.digests import INDEX_DIGEST, seal_index
from tests.fuzz.mutate import (
    NUMBERS,
    PATHS,
    WORDS,
    bytes_changed,
    edit_bytes,
    edit_json,
    json_changed,
    json_text,
    of_another_kind,
    put_odd_things,
)
from tools.cli import parser_of_all
from tools.config.run_file import known_keys

FOREIGN = Path(__file__).parents[1] / "foreign" / "files"
TRAIN = ["train", "my.toml", "train.steps=5"]
SIZES = [
    "model.layers",
    "model.hidden",
    "model.heads",
    "model.kv_heads",
    "model.head_dim",
    "model.ffn",
    "model.vocab",
]
SIZES += [
    "model.experts",
    "model.experts_per_token",
    "model.max_positions",
    "model.window",
    "parallel.tensor",
]
SIZES += [
    "parallel.pipeline",
    "parallel.data",
    "parallel.chunks",
    "parallel.bucket",
    "parallel.zero_size",
    "train.steps",
]
SIZES += [
    "train.global_batch",
    "train.micro_batch",
    "train.seq_length",
    "train.seed",
    "train.eval_every",
]
SIZES += [
    "train.eval_batches",
    "train.threads",
    "data.vocab_size",
    "data.max_chars",
    "data.workers",
    "lr.warmup",
]
SIZES += [
    "lr.decay",
    "lr.length",
    "fp8.margin",
    "fp8.history_length",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.keep_every",
    "log.every",
    "log.timeline",
    "log.digests",
]
SIZES += [
    "parallel.recompute_layers",
    "precision.growth_interval",
    "precision.hysteresis",
    "precision.patience",
]
BIG = [
    "1",
    "2",
    "4",
    "64",
    "1000",
    "4096",
    "100000",
    "1000000",
    "1000000000",
    str(2**31),
    str(2**62),
    str(2**63 - 1),
]
CHOICES = [
    "parallel.schedule=zb-v",
    "parallel.schedule=interleaved",
    "parallel.schedule=gpipe",
    "parallel.schedule=zb-h2",
]
CHOICES += [
    "precision.compute=bf16",
    "precision.compute=fp16",
    "fp8.kind=delayed",
    "model.family=gpt2",
    "model.family=mixtral",
]
CHOICES += [
    "parallel.recompute=full",
    "model.preset=gpt2",
    "parallel.sequence=true",
    "train.init_from=hf",
    "data.held_out=0.5",
]
Group = Callable[[Random, Path], list[str]]


def _run_command(rng: Random) -> list[str]:
    """A command on the run file, mostly `train`."""
    commands = (
        ["schedule", "my.toml"],
        ["precision", "show", "my.toml"],
        ["fp8-advice", "my.toml"],
    )
    return [*rng.choice((TRAIN, TRAIN, TRAIN, TRAIN, TRAIN, *commands))]


def one_override(rng: Random, folder: Path) -> list[str]:
    """One key with an odd value, on a run that resumes or in a new folder."""
    put_odd_things(folder)
    key = rng.choice(sorted(known_keys()))
    fresh = ["train.folder=fresh"] if rng.random() < 0.5 else []
    return [*_run_command(rng), *fresh, f"{key}={rng.choice([*NUMBERS, *WORDS, *PATHS])}"]


def extremes(rng: Random, folder: Path) -> list[str]:
    """One to three sizes with large values, and a choice."""
    keys = rng.sample(SIZES, rng.choice((1, 1, 2, 3)))
    more = [rng.choice(CHOICES)] if rng.random() < 0.4 else []
    return [
        *_run_command(rng),
        "train.folder=fresh",
        *more,
        *(f"{key}={rng.choice(BIG)}" for key in keys),
    ]


def paths(rng: Random, folder: Path) -> list[str]:
    """A key that is a path, with something else there than it should be."""
    put_odd_things(folder)
    keys = [
        "data.source",
        "data.tokenizer",
        "data.cache",
        "train.folder",
        "train.init_from",
        "parallel.schedule_file",
    ]
    given = [
        f"{key}={rng.choice(PATHS)}"
        for key in rng.sample([*keys, "log.sample", "model.factory"], rng.choice((1, 2)))
    ]
    return [*_run_command(rng), *given]


def run_files(rng: Random, folder: Path) -> list[str]:
    """A run file with changed bytes, lines and values."""
    file = folder / "my.toml"
    text = file.read_text()
    if rng.random() < 0.5:
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        key = lines[at].partition("=")[0]
        lines[at] = rng.choice(
            (
                lines[at] * 2,
                "",
                f"{key}= {rng.choice([*NUMBERS, *WORDS])}",
                f"[{rng.choice(WORDS)}]",
            )
        )
        content = "\n".join(lines).encode("utf-8", "surrogateescape")
    else:
        content = bytes_changed(rng, text.encode())
    file.write_bytes(content)
    return _run_command(rng)


def _commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield words, parser
    for action in inner:
        for word, one in action.choices.items():
            yield from _commands(one, (*words, word))


def command_lines(rng: Random, folder: Path) -> list[str]:
    """Any command with odd arguments and options."""
    put_odd_things(folder)
    usable = [
        (words, parser)
        for words, parser in _commands(parser_of_all())
        if words not in (("parity",), ("train",))
    ]
    words, parser = rng.choice(usable)
    argv = [*words]
    for action in parser._actions:
        if action.choices and rng.random() < 0.9:
            values = [str(choice) for choice in action.choices]
        else:
            values = None
        odd = values or (
            [*PATHS]
            if action.type is Path or not action.option_strings
            else [*NUMBERS, *WORDS, *PATHS]
        )
        if not action.option_strings and action.nargs != "*":
            argv.append(_likely(rng, words, odd))
        elif (
            action.option_strings
            and (action.required or rng.random() < 0.3)
            and "-h" not in action.option_strings
        ):
            option = action.option_strings[-1]
            argv += [option] if action.nargs == 0 else [f"{option}={rng.choice(odd)}"]
    return argv


def _likely(rng: Random, words: tuple[str, ...], odd: list[str]) -> str:
    """A positional argument: half of the time one that the command can use."""
    good = {
        "data": "text.txt",
        "precision": "my.toml",
        "schedule": "my.toml",
        "fp8-advice": "my.toml",
    }
    return good.get(words[0], "run") if rng.random() < 0.5 else rng.choice(odd)


def texts(rng: Random, folder: Path) -> list[str]:
    """A changed text, in each of the formats."""
    name = rng.choice(
        ("text.jsonl", "text.jsonl.gz", "text.jsonl.zst", "text.parquet", "short.txt")
    )
    if name == "text.jsonl" and rng.random() < 0.5:
        odd = [
            b'{"text": 5}',
            b'{"text": null}',
            b"[" * 5000,
            b'{"text": "\\ud800"}',
            b'{"text": ' + b"9" * 5000 + b"}",
        ]
        odd += [
            b"5",
            b"null",
            b"\xff",
            b'{"TEXT": "a"}',
            b"NaN",
            b'{"text": "' + b"a" * 100_000 + b'"}',
            b'{"a\\nb\\u0000": 1}',
        ]
        with (folder / name).open("ab") as file:
            file.write(rng.choice(odd) + rng.choice((b"\n", b"\n\n", b"")))
    elif rng.random() < 0.1:
        of_another_kind(rng, folder / name)
    else:
        edit_bytes(rng, folder / name)
    tokenizer = ["--tokenizer", "data/text.model"]
    if rng.random() < 0.3:
        tokenizer = ["--tokenizer", rng.choice(("hf/tokenizer.json", "bad.model"))]
        (folder / "bad.model").write_bytes(
            bytes_changed(rng, (folder / "data" / "text.model").read_bytes())
        )
        if rng.random() < 0.5:
            edit_json(rng, folder / "hf" / "tokenizer.json")
    if rng.random() < 0.3:
        return ["data", "verify", name, *tokenizer]
    return ["data", "build", name, "new", "--workers", "1", *tokenizer]


def token_files(rng: Random, folder: Path) -> list[str]:
    """Changed token files, their record and their tokenizer."""
    file = (
        folder
        / "data"
        / rng.choice(
            ("text.bin", "text.idx", "text.json", "text.model", "text.resume", ".lock", "text.idx")
        )
    )
    if rng.random() < 0.25 or not file.exists() or not file.stat().st_size:
        of_another_kind(rng, file)
    elif file.suffix == ".json" and rng.random() < 0.8:
        edit_json(rng, file)
    else:
        edit_bytes(rng, file)
    commands = (
        ["data", "verify", "data/text"],
        ["data", "inspect", "data/text"],
        TRAIN,
        [*TRAIN, "train.folder=fresh"],
    )
    more = [
        [*TRAIN, "train.folder=fresh", "data.source=data/text"],
        ["data", "build", "text.txt", "data/text", "--vocab-size=330"],
    ]
    more += [[*more[1], "--overwrite"]]
    return [*rng.choice((*commands, *more))]


def _of_weights(rng: Random, source: str) -> list[str]:
    commands = (
        ["inspect", source],
        ["inspect", source, "--tensors"],
        ["diff", source, "hf"],
        ["generate", source, "--prompt=the"],
        ["evaluate", source, "--data=text.txt"],
    )
    more = (
        ["convert", source, "new", "--no-verify"],
        ["train", "my.toml", "train.folder=new", f"train.init_from={source}"],
    )
    return [*rng.choice((*commands, *more, *more))] + (
        ["--no-verify"] if rng.random() < 0.0 else []
    )


def hugging_face(rng: Random, folder: Path) -> list[str]:
    """A changed Hugging Face folder: configuration, weights, index of shards, tokenizer."""
    source = shutil.copytree(folder / "hf", folder / "changed")
    if rng.random() < 0.3:
        weights = source / "model.safetensors"
        header = json.loads(
            weights.read_bytes()[8 : 8 + int.from_bytes(weights.read_bytes()[:8], "little")]
        )
        weights.rename(source / "model-00001-of-00001.safetensors")
        index = {
            "metadata": {"total_size": 1},
            "weight_map": {n: "model-00001-of-00001.safetensors" for n in header if n[:2] != "__"},
        }
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
    file = rng.choice([*source.iterdir(), source / "config.json", source / "config.json"])
    if file.suffix == ".safetensors":
        _edit_safetensors(rng, file)
    elif rng.random() < 0.15:
        of_another_kind(rng, file)
    else:
        edit_json(rng, file)
    argv = _of_weights(rng, "changed")
    return [*argv, "--no-verify"] if argv[0] == "train" else argv


def _edit_safetensors(rng: Random, file: Path) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if rng.random() < 0.7:
        header = json_text(rng, json_changed(rng, json.loads(content[8 : 8 + length])))
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    else:
        edit_bytes(rng, file)


def pickles(rng: Random, folder: Path) -> list[str]:
    """A changed pytorch_model.bin, in its bytes or in what it holds."""
    file = folder / "bin" / "pytorch_model.bin"
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    wide: Any = ["x" * 10]
    for _ in range(30):
        wide = [wide, wide]
    some = torch.load(file, weights_only=True)
    odd: list[Any] = [
        {1: torch.ones(2)},
        deep,
        wide,
        {"a": wide},
        [],
        5,
        None,
        {"a": 5},
        {"a" * 100_000: torch.ones(1)},
    ]
    odd += [
        {**some, 5: 6},
        {**some, ("a", 1): torch.ones(1)},
        {**some, "x": torch.empty(0)},
        {**some, "y": torch.ones(()).expand(10**6)},
    ]
    odd += [
        {**some, "z": 10**5000},
        {**some, "z": "\ud800"},
        {**some, "z": torch.ones(2, dtype=torch.complex64)},
        {None: 1},
    ]
    odd += [
        {**some, "z": torch.ones(3).to_sparse()},
        argparse.Namespace(a=1),
        {**some, "z": float("nan")},
    ]
    if rng.random() < 0.6:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(20_000)  # to write what is nested deep
        torch.save(rng.choice(odd), file)
        sys.setrecursionlimit(limit)
    elif rng.random() < 0.3:
        of_another_kind(rng, file)
    else:
        edit_bytes(rng, file)
    return _of_weights(rng, "bin")[:3]


def megatron(rng: Random, folder: Path) -> list[str]:
    """A changed checkpoint of Megatron: its tracker, the arguments in it, its files."""
    source = folder / "megatron"
    file = rng.choice(
        [
            *(path for path in source.rglob("*") if path.is_file()),
            source / "latest_checkpointed_iteration.txt",
        ]
    )
    if file.suffix == ".pt" and rng.random() < 0.7:
        content = torch.load(file, weights_only=False)
        args = content["args"]
        name = rng.choice(sorted(vars(args)))
        setattr(
            args,
            name,
            rng.choice(
                [None, 0, -1, 10**6, 10**30, "x", [], {}, 0.5, True, float("nan"), "\ud800"]
            ),
        )
        torch.save(content, file)
    elif file.name.startswith("latest") and rng.random() < 0.7:
        file.write_bytes(
            rng.choice(
                (
                    b"\xff",
                    b"9" * 5000,
                    b"",
                    b"-1",
                    b"release",
                    b"../x",
                    b"1\0",
                    b"x" * 300,
                    b"0 0",
                    "٣".encode(),
                )
            )
        )
    elif rng.random() < 0.3:
        of_another_kind(rng, file)
    else:
        edit_bytes(rng, file)
    return _of_weights(rng, "megatron")[:3]


def checkpoints(rng: Random, folder: Path) -> list[str]:
    """A changed checkpoint: checkpoint.json, with a fitting digest, without or with a wrong one, or
    its shards."""
    saved = folder / "run" / "checkpoints" / "step_00000004"
    file = saved / "checkpoint.json"
    if rng.random() < 0.8:
        index = {
            key: value
            for key, value in json.loads(file.read_bytes()).items()
            if key != INDEX_DIGEST
        }
        changed = json_changed(rng, index)
        kind = rng.randrange(4)
        if kind == 0 and isinstance(changed, dict):
            changed.pop("sha256", None)
            changed.pop("data", None)
        file.write_bytes(
            json_text(rng, changed)
            if kind < 2 or not isinstance(changed, dict) or not changed
            else seal_index(changed)
        )
    elif rng.random() < 0.5:
        of_another_kind(rng, rng.choice([*saved.iterdir(), saved]))
    else:
        edit_bytes(rng, rng.choice([*saved.iterdir()]))
    commands = (
        TRAIN,
        TRAIN,
        ["inspect", "run"],
        ["generate", "run", "--prompt=the"],
        ["evaluate", "run", "--data=text.txt"],
        ["convert", "run", "new", "--no-verify"],
    )
    more = (
        ["diff", "run", "hf"],
        [
            "train",
            "my.toml",
            "train.folder=new",
            f"train.init_from={saved.relative_to(folder)}",
            "--no-verify",
        ],
    )
    return [*rng.choice((*commands, *more))]


def run_folders(rng: Random, folder: Path) -> list[str]:
    """What a run leaves, of another kind, with odd lines, or with leftovers between its
    checkpoints."""
    run = folder / "run"
    names = [
        "metrics.jsonl",
        "events.jsonl",
        ".lock",
        "run.toml",
        "run.tmp",
        "metrics.jsonl.part",
        "tensorboard",
        "checkpoints",
    ]
    names += [
        "checkpoints/.step_00000005.partial",
        "checkpoints/step_00000009",
        "checkpoints/step_x",
        "checkpoints/.step_00000002.old",
    ]
    names += [
        "loss.svg",
        "timeline.json",
        "run.resolved.toml",
        "shadow.jsonl",
        "metrics.jsonl.old",
        "text.model",
        "data",
        "pending",
    ]
    name = rng.choice(names)
    lines = [
        b"5",
        b"[]",
        b"{}",
        b"null",
        b"\xff",
        b"[" * 5000,
        b'{"step": "x"}',
        b'{"step": 1e400}',
        b'{"step": 3, "loss": null}',
        b'{"step":' + b"9" * 5000 + b"}",
    ]
    if name.endswith(".jsonl") and rng.random() < 0.7:
        old = (run / name).read_bytes().splitlines() if (run / name).exists() else []
        old.insert(rng.randrange(len(old) + 1), rng.choice(lines))
        if old and rng.random() < 0.5:
            old[-1] = bytes_changed(rng, old[-1])
        (run / name).write_bytes(b"\n".join(old) + rng.choice((b"\n", b"")))
    else:
        of_another_kind(rng, run / name)
    commands = (
        ["explain-overflow", "run"],
        ["compare", "run", "run", "-o", "x.svg"],
        ["schedule", "my.toml", "parallel.pipeline=2"],
    )
    more = ['log.to=["tensorboard"]', "log.plot=true", "log.timeline=5"]
    return [*rng.choice((TRAIN, TRAIN, [*TRAIN, rng.choice(more)], *commands, ["inspect", "run"]))]


def precision_files(rng: Random, folder: Path) -> list[str]:
    """A changed configuration of another system."""
    given = rng.choice([path for path in sorted(FOREIGN.iterdir()) if path.is_file()])
    file = folder / given.name
    shutil.copy(given, file)
    if rng.random() < 0.1:
        of_another_kind(rng, file)
    elif file.suffix == ".json" and rng.random() < 0.7:
        edit_json(rng, file)
    else:
        edit_bytes(rng, file)
    system = rng.choice(("native", "nxd", "smp", "colossalai", "internevo", "nemo"))
    return rng.choice(
        (["precision", "show", file.name], ["precision", "translate", file.name, "--to", system])
    )


GROUPS: tuple[Group, ...] = (
    one_override,
    extremes,
    paths,
    run_files,
    command_lines,
    texts,
    token_files,
    hugging_face,
    pickles,
    megatron,
    checkpoints,
    run_folders,
    precision_files,
)
