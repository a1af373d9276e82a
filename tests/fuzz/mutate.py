"""Odd values, and changes to bytes, to JSON and to files, from a random number generator."""

import copy
import json
import os
import shutil
import string
from pathlib import Path
from random import Random
from typing import Any

NUMBERS = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "1e400",
    "-0.0",
    "nan",
    "inf",
    "-inf",
    "1e-400",
    "0.5",
    "8.0",
    "0x10",
    "1_000",
]
NUMBERS += [
    "100000",
    "1000003",
    "4294967296",
    str(2**31 - 1),
    str(2**63 - 1),
    str(2**63),
    str(2**64),
    str(10**30),
]
NUMBERS += ["9" * 400, "9" * 5000, "-" + "9" * 5000]
WORDS = [
    "",
    "''",
    '""',
    "true",
    "none",
    "[]",
    "{}",
    "[1, 2]",
    "[[[]]]",
    "{a = 1}",
    '["*"]',
    "'a\\u0000b'",
    '"a\\u0000b"',
]
WORDS += [
    "a\0b",
    "x" * 300,
    "x" * 70000,
    "x/" * 3000,
    "\udcff\udcfe",
    '"\\ud800"',
    "\x1b[31m",
    "a\nb",
    "..",
    ".",
    "~",
    "~nobody",
]
WORDS += [
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "/dev/full",
    "/nonexistent/x",
    "my.toml/x",
    "run",
    "hf",
    "my.toml",
    "text.txt",
]
WORDS += [
    "[" * 2000,
    "[" * 2000 + "]" * 2000,
    "{a=" * 2000,
    "[" * 500 + "1" + "]" * 500,
    "1979-05-27",
    "07:32:00",
    "$HOME",
    "%s%n",
]
WORDS += [
    "data/text",
    "python",
    "é" * 200,
    "-",
    "--",
    "=",
    "a=b",
    "'''",
    '"""',
    "1 = 2",
    "1\n2",
    "*",
    "**",
    "[a-",
    "(",
    "\\",
]
PATHS = [
    "",
    ".",
    "..",
    "a\0b",
    "x" * 300,
    "x/" * 3000,
    "\udcff",
    "my.toml",
    "my.toml/x",
    "nowhere",
    "run",
    "hf",
    "hf/config.json",
]
PATHS += [
    "run/checkpoints",
    "run/checkpoints/step_00000004",
    "data",
    "data/text",
    "data/text.model",
    "data/text.idx",
    "/dev/null",
]
PATHS += [
    "text.txt",
    "text.jsonl",
    "text.parquet",
    "megatron",
    "bin",
    "bin/pytorch_model.bin",
    "hf/tokenizer.json",
    "/dev/full",
]
PATHS += [
    "/proc/self/mem",
    "~nobody/x",
    "new",
    "new/deep/x",
    "folder",
    "link",
    "fifo",
    "locked",
    "é",
    "-",
    "--x",
    " ",
]
JSON_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    10**6,
    2**63,
    10**30,
    -(10**30),
    1e308,
    0.5,
    float("nan"),
]
JSON_VALUES += [
    float("inf"),
    "",
    "a",
    "\0",
    "../x",
    "/etc/passwd",
    "x" * 300,
    "\ud800",
    "1",
    [],
    {},
    [[]],
    [1],
    {"a": 1},
    [None],
]
JSON_VALUES += ["fp32", "float32", [0, 0], [10**9, 10**9], "x" * 100_000]


def bytes_changed(rng: Random, content: bytes) -> bytes:
    """Some bytes flipped, cut out, put in, doubled or moved."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        size = rng.choice((1, 1, 2, 8, 64))
        kind = rng.randrange(7)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at : at + size]
        elif kind == 2:
            changed[at:at] = rng.choice(
                (
                    b"\0",
                    b"\xff",
                    b"\xff" * 8,
                    b"[" * 3000,
                    b"9" * 5000,
                    b"\n",
                    b'"',
                    b"{",
                    b"=",
                    b"\r",
                )
            )
        elif kind == 3:
            del changed[at:]
        elif kind == 4:
            changed[at:at] = changed[at : at + size]
        elif kind == 5:
            changed[at : at + size] = rng.randbytes(size)
        else:
            changed[at : at + 8] = rng.choice(
                (b"\0" * 8, b"\xff" * 8, b"\xff" * 7 + b"\x7f", (10**12).to_bytes(8, "little"))
            )
    return bytes(changed)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys."""
    if isinstance(value, dict):
        return [(value, key) for key in value] + [
            place for inner in value.values() for place in _places(inner)
        ]
    if isinstance(value, list):
        return [(value, i) for i in range(len(value))] + [
            place for inner in value for place in _places(inner)
        ]
    return []


def _value(rng: Random) -> Any:
    return copy.deepcopy(rng.choice(JSON_VALUES))  # a list of its own, which may be changed again


def json_changed(rng: Random, value: Any) -> Any:
    """A JSON value with entries changed, lost, added or doubled, or nested deep."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(value)
        if not places or rng.random() < 0.03:
            return _value(rng)
        inside, key = rng.choice(places if rng.random() < 0.5 else places[: max(1, len(value))])
        kind = rng.randrange(5)
        if kind == 0:
            del inside[key]
        elif kind == 1 and isinstance(inside, dict):
            inside[rng.choice(["a", "", "\0", "x" * 300, str(key) + "x"])] = _value(rng)
        elif kind == 2 and isinstance(inside[key], int | float):
            inside[key] = rng.choice(
                (
                    -inside[key],
                    inside[key] + 1,
                    inside[key] * 10**6,
                    float(inside[key]),
                    str(inside[key]),
                )
            )
        else:
            inside[key] = _value(rng)
    return value


def json_text(rng: Random, value: Any) -> bytes:
    """The bytes of a changed JSON value; seldom with what JSON cannot say: huge integers, deep
    nesting."""
    text = json.dumps(value)
    if rng.random() < 0.08 and isinstance(value, dict):
        odd = rng.choice(
            (
                "9" * 5000,
                "[" * 3000 + "]" * 3000,
                '{"a":' * 3000 + "1" + "}" * 3000,
                "1e999",
                "-" + "9" * 20,
            )
        )
        if rng.random() < 0.5:
            text = f'{{"{rng.choice([*value, "a"])}": {odd}, {text[1:]}'
        else:
            text = f'{text[:-1]}, "{rng.choice([*value, "a"])}": {odd}}}'
    content = text.encode("utf-8", "surrogatepass")
    return bytes_changed(rng, content) if rng.random() < 0.1 else content


def edit_json(rng: Random, file: Path) -> None:
    """Changes a JSON file."""
    file.write_bytes(json_text(rng, json_changed(rng, json.loads(file.read_bytes()))))


def edit_bytes(rng: Random, file: Path) -> None:
    """Changes the bytes of a file."""
    file.write_bytes(bytes_changed(rng, file.read_bytes()))


def of_another_kind(rng: Random, file: Path) -> None:
    """Puts something else in place of a file or folder: none, empty, a folder, a pipe, a link,
    noise."""
    shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    kind = rng.randrange(10)
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        (file / "inside").mkdir(parents=True)
        (file / "inside" / "x").touch()
    elif kind == 2:
        os.mkfifo(file)
    elif kind == 3:
        file.symlink_to(
            rng.choice(("nowhere", file.name, "/dev/zero", "/dev/full", "/proc/self/mem", ".."))
        )
    elif kind == 4:
        file.touch()
    elif kind == 5:
        file.write_bytes(rng.randbytes(rng.choice((1, 10, 1000))))
    elif kind == 6:
        file.write_bytes(
            rng.choice(
                (b"\xff\xfe", b"\0" * 100, b"null", b"[]", b"{}", b"5", b"[" * 5000, b"9" * 5000)
            )
        )
    elif kind == 7:
        file.write_text(rng.choice(WORDS), "utf-8", "surrogateescape")
    elif kind == 8:
        file.write_text("".join(rng.choices(string.printable, k=200)))


def put_odd_things(folder: Path) -> None:
    """Things in a folder that are no good files: a folder, links, a pipe."""
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("nowhere")
    os.mkfifo(folder / "fifo")
