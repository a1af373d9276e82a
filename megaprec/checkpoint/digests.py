"""Digests, by which a file that is no longer what was saved is known from one that is.

checkpoint.json holds the SHA-256 of every other file and ends with that of itself. What a rank writes is hashed in its
memory, not read back, so a byte that goes wrong on its way to the disk is found too. SHA-256, because processors have
instructions for it: of what the standard library has nothing sound is faster there, and `sha256sum` finds the same.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OWN = "digest"  # key, in checkpoint.json, of what the rest of it hashes to
OTHERS = "sha256"  # key, in checkpoint.json, of digests by name of file


def file_digest(file: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def tensors_digest(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hex, that the safetensors file `file` must have: of its header and of the tensors in memory.

    tensors: by name, on the CPU, just those that the file was made of.
    """
    with file.open("rb") as opened:
        length = opened.read(8)
        header = opened.read(int.from_bytes(length, "little"))
    made = hashlib.sha256(length + header)
    entries: dict[str, Any] = json.loads(header)
    for name in sorted(tensors, key=lambda name: entries[name]["data_offsets"]):
        made.update(raw(tensors[name]))
    return made.hexdigest()


def raw(values: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, in its logical order."""
    flat = values.contiguous().as_strided((values.numel(),), (1,))  # of one element any stride is contiguous
    return flat.view(torch.uint8).numpy().data


def sealed(index: dict[str, Any]) -> bytes:
    """The bytes of a checkpoint.json that holds `index` and, last, their digest."""
    text = json.dumps(index, indent=1)
    return f'{text[:-2]},\n "{OWN}": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}'.encode()


def is_sealed(content: bytes, index: Any) -> bool:
    """Whether the bytes, which read as `index`, are those that `sealed` made. So are those of an earlier version, which
    hold no digest at all."""
    if not isinstance(index, dict) or not {OWN, OTHERS} & index.keys():
        return True
    return content == sealed({key: value for key, value in index.items() if key != OWN})
