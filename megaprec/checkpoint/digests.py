"""SHA-256 digests that detect a checkpoint file that has changed since it was saved.

checkpoint.json contains the SHA-256 of every other file and ends with its own. A rank hashes its
tensors in memory instead of reading them back, so a byte that is corrupted on its way to the disk
is detected too. Processors have instructions for SHA-256, so no other secure hash in the standard
library is faster there, and `sha256sum` computes the same digests.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.checkpoint.object_store import object_digest
from megaprec.durable import reading
from megaprec.tokens.places import is_remote

INDEX_DIGEST = "digest"  # key in checkpoint.json: the digest of the rest of checkpoint.json
FILE_DIGESTS = "sha256"  # key in checkpoint.json: digests of the other files, by name


def file_digest(file: Path) -> str:
    """Return the SHA-256 of the bytes of a file or an object, in hex. Raises OSError."""
    if is_remote(file):
        return object_digest(file)
    with reading(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def tensor_bytes(values: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, in logical order."""
    # not by `view`: torch calls a tensor of one element contiguous, whatever its strides are
    flat = values.contiguous().as_strided((values.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def seal_index(index: dict[str, Any]) -> bytes:
    """Return the bytes of a checkpoint.json: `index` and, at the end, its digest."""
    text = json.dumps(index, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    # last in the file, where `megaprec.checkpoint.keeping` finds it without reading megabytes
    without_brace = text[:-2]  # it ends with a line of "}"
    sealed_text = f'{without_brace},\n "{INDEX_DIGEST}": "{digest}"\n}}'
    return sealed_text.encode()


def is_sealed(content: bytes, index: Any) -> bool:
    """Return True if `content`, which parses to `index`, is what `seal_index` returns for it.

    True also if there is no digest at all, as in checkpoints of earlier versions.
    """
    has_digests = isinstance(index, dict) and {INDEX_DIGEST, FILE_DIGESTS} & index.keys()
    if not has_digests:
        return True
    unsealed = {key: value for key, value in index.items() if key != INDEX_DIGEST}
    return content == seal_index(unsealed)
