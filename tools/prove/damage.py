"""Damage to a checkpoint that its own checks do not see: the control that a proof would find a
difference.

One sign is turned in one element of a moment, or of a weight if the optimizer keeps no moments, and
the digests of the file are made to fit. A run that resumes from it computes another state.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megaprec.checkpoint.digests import FILE_DIGESTS, OWN_DIGEST, file_digest, seal_index
from megaprec.checkpoint.reader import INDEX, Store
from megaprec.errors import UserError


def turn_one_sign(checkpoint: Path) -> str:
    """Turn the sign of the largest element of a moment; return "kind/logical name". Raises
    UserError if all are zero.

    The files must not be shared with another checkpoint.
    """
    store = Store(checkpoint)
    tensors = store.index["tensors"]
    # moments first; codes of FP8 are bytes of another format
    keys = [key for key in tensors if not key.startswith("fp8/")]
    for key in sorted(keys, key=lambda key: (key.startswith("weight/"), key)):
        name = tensors[key]["chunks"][0]["file"]
        stored_key = key.removeprefix("weight/")
        with safe_open(store.file(name), "pt") as opened:
            values = opened.get_tensor(stored_key).flatten()
        index = int(values.abs().argmax())
        if values[index] != 0:
            _turn_sign(store.file(name), stored_key, index, values)
            _update_digest(store, name)
            return key
    raise UserError.of("prove.nothing_to_damage", checkpoint=checkpoint)


def _turn_sign(file: Path, key: str, index: int, values: Tensor) -> None:
    """Turn the sign of element `index` of a stored tensor, whose `values` are given, in the
    file."""
    turned = (-values[index : index + 1]).view(torch.uint8).numpy().tobytes()
    with file.open("r+b") as opened:
        # a safetensors file: the length of the header in 8 bytes, the header, the tensors
        header_length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(header_length))
        tensor_start = 8 + header_length + header[key]["data_offsets"][0]
        opened.seek(tensor_start + index * values.itemsize)
        opened.write(turned)


def _update_digest(store: Store, name: str) -> None:
    """Write the digest of a changed file into checkpoint.json."""
    index = {key: value for key, value in store.index.items() if key != OWN_DIGEST}
    index[FILE_DIGESTS] = {**store.digests, name: file_digest(store.file(name))}
    (store.path / INDEX).write_bytes(seal_index(index))
