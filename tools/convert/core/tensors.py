"""The places of tensors in files, and reading and writing them one at a time.

Files are read, not mapped, so that a program's memory is what it holds and not what it has touched.
A safetensors file is 8 bytes with the length of a JSON header, the header, and the values one after
another; since the header can be written before any value is known, a file of any size is filled in
place, tensor by tensor.
"""

import errno
import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megaprec.checkpoint.digests import tensor_bytes
from megaprec.durable import naming_file, reading
from megaprec.errors import UserError
from megaprec.parsing import parse_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Bytes that are moved at a time: they stay in the processor's caches, and Linux finds room for them
# in small pieces. A write of 4 MiB makes it look for whole huge pages, which may take several times
# as long as the copy.
PIECE = 1 << 20


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    start: byte of its first element.
    strides: in elements; None: the values are contiguous.
    crc: CRC-32 of its bytes, if the file states it: they are held against it when they are read.
    within: a tensor of which this is the first part, so that reading this holds all of that against
        its checksum.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...] | None = None
    crc: int | None = None
    within: "Stored | None" = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the values."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def _span(self) -> int:
        """Return the elements in the file from the first one to the last one."""
        if self.strides is None:
            return prod(self.shape)
        steps = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)

    def read(self) -> Tensor:
        """Return the tensor. Raises UserError if the file ends before it, or has other bytes than
        it says."""
        if self.within is not None:
            self.within._check_crc()
        # An empty tensor may lie at the end of a file, where there is nothing to read.
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        values = self._read_elements(self._span)
        if self.strides is None:
            return values.view(self.shape)
        # A view on the span of the file that has all elements, others' between them too.
        return values.as_strided(self.shape, self.strides)

    def rows(self, top: int, bottom: int) -> Tensor:
        """Return rows [top, bottom), without reading the others."""
        if self.strides is not None or (top, bottom) == (0, self.shape[0]):
            return self.read()[top:bottom]
        row_shape = self.shape[1:]
        row_bytes = prod(row_shape) * self.dtype.itemsize
        rows = self.part((bottom - top, *row_shape), self.start + top * row_bytes)
        return rows.read()

    def part(
        self, shape: tuple[int, ...], start: int, strides: tuple[int, ...] | None = None
    ) -> "Stored":
        """Return a part of this tensor. start, strides: as those of a tensor."""
        checked = self if self.crc is not None else self.within
        # Only the first part checks the whole, so that it is checked once and not for each part.
        within = checked if start == self.start else None
        return replace(self, shape=shape, start=start, strides=strides, crc=None, within=within)

    def _check_crc(self) -> None:
        """Raise UserError if the bytes are others than the file says. They are never in memory as a
        whole."""
        crc = 0
        remaining = self._span * self.dtype.itemsize
        with reading(self.file, buffering=0) as file:
            file.seek(self.start)
            while remaining and (piece := file.read(min(PIECE, remaining))):
                crc = zlib.crc32(piece, crc)
                remaining -= len(piece)
        self._require_crc(crc)

    def _require_crc(self, crc: int) -> None:
        if self.crc is not None and crc != self.crc:
            raise UserError.of("convert.crc_differs", file=self.file, shape=list(self.shape))

    def _read_elements(self, count: int) -> Tensor:
        """Return elements of the file from the tensor's start on. Raises UserError if it ends
        before, or if they are damaged."""
        size = count * self.dtype.itemsize
        if self.start < 0 or self.start + size > self.file.stat().st_size:
            raise UserError.of("convert.truncated", file=self.file)
        # Bytes first, for numpy has no bf16 and no FP8 to read into.
        values = torch.empty(size, dtype=torch.uint8)
        with reading(self.file, buffering=0) as file:
            file.seek(self.start)
            unfilled = values.numpy().data
            while unfilled and (count_read := file.readinto(unfilled)):
                unfilled = unfilled[count_read:]
        if self.crc is not None:
            self._require_crc(zlib.crc32(values.numpy().data))
        return values.view(self.dtype)


def torch_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def safetensors_in(safetensors_file: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file. Raises UserError if the safetensors library finds
    it damaged."""
    try:
        # The library checks the header; the values are read here, without a map of the file.
        with safe_open(safetensors_file, "pt"):
            pass
        with reading(safetensors_file) as opened:
            (header_length,) = struct.unpack("<Q", opened.read(8))
            header = parse_json(opened.read(header_length))
    except (OSError, SafetensorError, ValueError, struct.error) as error:
        raise UserError.of("convert.not_safetensors", file=safetensors_file, error=error) from error
    # What the writer said about the file, and no tensor.
    header.pop("__metadata__", None)
    unknown = {entry["dtype"] for entry in header.values()} - DTYPES.keys()
    if unknown:
        raise UserError.of(
            "convert.dtype_unsupported", file=safetensors_file, unknown=", ".join(sorted(unknown))
        )
    values_start = 8 + header_length
    tensors = {}
    for name, entry in header.items():
        dtype = DTYPES[entry["dtype"]]
        shape = tuple(entry["shape"])
        first, _ = entry["data_offsets"]
        tensors[name] = Stored(safetensors_file, dtype, shape, values_start + first)
    return tensors


def reserve_safetensors(
    safetensors_file: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], write: bool
) -> dict[str, int]:
    """Return the first byte of each tensor in a safetensors file with room for all of them.

    write: create the file.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    offsets: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
        offsets[name] = end
        end += prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offsets[name], end],
        }
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)  # values begin at a multiple of 8 bytes
    values_start = 8 + len(content)
    if write:
        with naming_file(safetensors_file), open(safetensors_file, "wb") as opened:
            opened.write(struct.pack("<Q", len(content)) + content)
            allocate(opened.fileno(), values_start + end)
    return {name: values_start + offset for name, offset in offsets.items()}


def allocate(descriptor: int, size: int) -> None:
    """Allocate `size` bytes for a file, so that a full disk is found before the work.

    Where the system or the filesystem cannot (macOS, some network filesystems), the file gets its
    size, and the disk must have room for it now. Raises OSError if it has not.
    """
    if not size:
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
        return
    except AttributeError:  # macOS has no such call
        pass
    except OSError as error:
        # The filesystem cannot allocate; a full disk is another error.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    disk = os.fstatvfs(descriptor)
    if size > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(descriptor, size)


def fill(file: Path, start: int, values: Tensor) -> None:
    """Write `values` at byte `start` of an allocated file."""
    content = tensor_bytes(values)
    with naming_file(file), open(file, "r+b", buffering=0) as opened:
        opened.seek(start)
        while content:
            written = opened.write(content[:PIECE])
            content = content[written:]
