"""Writing of a safetensors file, hashed on the way: a header of JSON, then the values of the
tensors in its order.

The file is written in pieces of a megabyte, each hashed while it is in the processor's cache.
Hashing, writing and flushing let other threads of the process run, so that a save in a thread does
not stop the training beside it.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.checkpoint.digests import tensor_bytes
from megaprec.checkpoint.object_store import write_object
from megaprec.durable import naming_file, write_all
from megaprec.tokens.places import is_remote

PIECE = 1 << 20  # bytes that are hashed and written at a time
NAMES = {  # dtypes in the header of a safetensors file
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file of CPU tensors, wait until it is on the disk or at its URL, and
    return its SHA-256 in hex.

    Raises OSError with the path.
    """
    digest = hashlib.sha256()
    if is_remote(path):
        write_object(path, _digested(_pieces(tensors), digest))
        return digest.hexdigest()
    with naming_file(path), path.open("wb", buffering=0) as file:
        for piece in _pieces(tensors):
            digest.update(piece)
            write_all(file.fileno(), piece)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _digested(pieces: Iterable[memoryview], digest: "hashlib._Hash") -> Iterator[memoryview]:
    """Yield the pieces, and add them to the digest."""
    for piece in pieces:
        digest.update(piece)
        yield piece


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of the file: the header, then the values in pieces."""

    def widest_first(name: str) -> tuple[int, str]:
        return -tensors[name].itemsize, name

    # so that values are aligned: each begins at a multiple of its own width
    ordered = {name: tensors[name] for name in sorted(tensors, key=widest_first)}
    yield memoryview(_header(ordered))
    for values in ordered.values():
        content = tensor_bytes(values)
        for start in range(0, len(content), PIECE):
            yield content[start : start + PIECE]


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the header of a file with these tensors in this order: its length, then JSON."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        first = end
        end += values.nbytes
        header[name] = {
            "dtype": NAMES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [first, end],
        }
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)  # the values begin at a multiple of eight bytes
    return len(content).to_bytes(8, "little") + content
