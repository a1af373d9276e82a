"""Reader of checkpoints: logical tensors, or any rectangle of one, from the chunks in a
checkpoint's files."""

import stat
from collections.abc import Callable, Iterator, Sequence
from math import prod
from operator import add, lt, sub
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    field_validator,
    model_validator,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megaprec.checkpoint.atomic import INDEX
from megaprec.checkpoint.digests import FILE_DIGESTS, is_sealed
from megaprec.checkpoint.fetched import fetched
from megaprec.checkpoint.object_store import read_file, sizes
from megaprec.checkpoint.ranges import StoredBlock, blocks, stored_shape
from megaprec.checkpoint.remote_shard import RemoteShard
from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part
from megaprec.durable import PlaceError
from megaprec.errors import Problem, UserError
from megaprec.parsing import parse_json
from megaprec.tokens.places import is_remote

FORMAT = 2  # 1: every chunk has its whole rectangle; 2: a chunk may have a flat range of it
SCALER = {"scale", "growth_tracker", "hysteresis_tracker"}
TENSORS = ".safetensors"  # ends the names of files with tensors
SHOWN_ERRORS = 5  # of a damaged index; more tell no more

Count = Annotated[int, Field(ge=0)]
Rate = Annotated[FiniteFloat, Field(ge=0)]


class _Table(BaseModel):
    # strict: no number for a text, no text for a number
    model_config = ConfigDict(strict=True)


class _Chunk(_Table):
    file: str
    offset: list[Count]
    shape: list[Count]
    range: list[Count] | None = None

    @model_validator(mode="after")
    def _is_within(self) -> Self:
        """Raise ValueError unless `range` is a range of the elements of the rectangle."""
        if self.range is None:
            return self
        refusal = f"{self.range} is no range of the elements of {self.shape}"
        if len(self.range) != 2:
            raise ValueError(refusal)
        first, last = self.range
        if not first < last <= prod(self.shape):
            raise ValueError(refusal)
        return self


class _Tensor(_Table):
    dtype: str
    shape: list[Count]
    chunks: list[_Chunk]
    frozen: bool = False  # True for a weight that was not trained, and has no moments

    @field_validator("dtype")
    @classmethod
    def _is_a_dtype(cls, dtype: str) -> str:
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"{dtype!r} is no dtype of torch")
        return dtype


class _Group(_Table):
    """A group of parameters with a learning rate; a rule or a scheduler may have added keys."""

    factors: Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]
    lr: Rate = 0.0
    weight_decay: Rate = 0.0


class _Optimizer(_Table):
    steps: Count
    scaler: dict[str, FiniteFloat]
    rule: dict[str, FiniteFloat] = {}  # earlier versions saved none
    param_groups: list[_Group] = []  # none if each step is given its rate

    @field_validator("scaler")
    @classmethod
    def _is_known(cls, scaler: dict[str, float]) -> dict[str, float]:
        """Raise ValueError unless `scaler` is the state of a dynamic scale, or empty, as for a
        constant scale."""
        if not scaler:
            return scaler
        refusal = f"{scaler} is no state of a loss scaler"
        if scaler.keys() != SCALER:
            raise ValueError(refusal)
        if scaler["scale"] <= 0 or scaler["growth_tracker"] < 0:
            raise ValueError(refusal)
        return scaler


class _FP8(_Table):
    rolls: Count


class _Index(_Table):
    """The fields of every checkpoint.json; callers may add others."""

    step: Count
    optimizer: _Optimizer
    files: dict[str, Count]
    sha256: dict[str, str] = {}  # earlier versions recorded none
    tensors: dict[str, _Tensor]
    fp8: _FP8 = _FP8(rolls=0)  # earlier versions saved none


ALONE = Axis("world")


class Store:
    """An opened checkpoint. `index` is its checkpoint.json.

    world: the ranks that open it together; each looks at its share of the files. Default: all files
    are looked at. Raises UserError if there is no complete checkpoint at `path`, or if its format
    is unknown.
    """

    def __init__(self, path: Path, world: Axis = ALONE) -> None:
        self.path = path
        self._open = {}  # opened files by name
        content, self.index = _read_index(path)
        if not is_sealed(content, self.index):
            raise UserError.of("checkpoint.digest_differs", path=path, index=INDEX)
        _require_known_format(path, self.index)
        try:
            _Index.model_validate(self.index)
        except ValidationError as error:
            problems = [Problem.of("checkpoint.index_digest_differs", path=path, index=INDEX)]
            for detail in error.errors()[:SHOWN_ERRORS]:
                key = ".".join(map(str, detail["loc"]))
                problems.append(
                    Problem.of("checkpoint.index_field", key=key, problem=detail["msg"])
                )
            raise UserError(*problems) from error
        self._check_files(world)

    def _check_files(self, world: Axis) -> None:
        """Raise UserError, naming all, for files of which the index cannot be true: with a name
        outside of the checkpoint, of another size, without a digest, or too small for their
        tensors."""
        files: dict[str, int] = self.index["files"]
        problems = list(self._check_tensors())
        size_of = _sizes_of(self.path)
        for number, (name, size) in enumerate(files.items()):
            file = self.path / name
            is_in_share = number % world.size == world.rank
            if Path(name).name != name:  # such as ../../.ssh/key
                problems.append(
                    Problem.of("checkpoint.file_outside", path=self.path, index=INDEX, name=name)
                )
            # each rank looks at its share of the files
            elif is_in_share and size_of(name) != size:
                problems.append(Problem.of("checkpoint.file_size", file=file, size=size))
        if self.digests and self.digests.keys() != files.keys():
            problems.append(
                Problem.of("checkpoint.digests_of_other_files", path=self.path, index=INDEX)
            )
        if problems:
            raise UserError(*problems)

    def _check_tensors(self) -> Iterator[Problem]:
        """Yield a problem for each tensor whose chunks do not have as many elements as it has, or
        are larger than their files."""
        sizes = self.index["files"]
        for key, entry in self.index["tensors"].items():
            itemsize = getattr(torch, entry["dtype"]).itemsize
            num_stored = 0  # elements in all chunks
            chunks_fit = True
            for chunk in entry["chunks"]:
                chunk_elements = prod(stored_shape(chunk))
                num_stored += chunk_elements
                # that each file is listed is checked when it is opened
                file_size = sizes.get(chunk["file"])
                if file_size is not None and chunk_elements * itemsize > file_size:
                    chunks_fit = False
            has_kind = "/" in key  # kind/logical name
            if not has_kind or not chunks_fit or num_stored != prod(entry["shape"]):
                yield Problem.of(
                    "checkpoint.tensor_incomplete", path=self.path, index=INDEX, key=key
                )

    def file(self, name: str) -> Path:
        """Return the path of a file of the checkpoint. A file at a URL that has no tensors is
        copied to this machine, and the path is that of the copy. Raises UserError unless
        checkpoint.json lists it."""
        files = self.index["files"]
        if name not in files:
            raise UserError.of("checkpoint.file_missing", path=self.path, name=name)
        if is_remote(self.path) and not name.endswith(TENSORS):
            # of a tokenizer all files together, for one names what the others say
            small = {each: files[each] for each in files if not each.endswith(TENSORS)}
            return fetched(self.path, small, self.digests) / name
        return self.path / name

    @property
    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file, in hex; empty if an earlier version saved the
        checkpoint."""
        return self.index.get(FILE_DIGESTS, {})

    def files_of(self, kind: str) -> set[str]:
        """Return the files that contain tensors of a kind: weight, exp_avg, exp_avg_sq or fp8."""
        files: set[str] = set()
        for key, entry in self.index["tensors"].items():
            if key.startswith(f"{kind}/"):
                files |= {chunk["file"] for chunk in entry["chunks"]}
        return files

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Return logical name -> shape of the tensors of a kind: weight, exp_avg or exp_avg_sq."""
        shapes: dict[str, tuple[int, ...]] = {}
        for key, entry in self.index["tensors"].items():
            kind_of_entry, _, name = key.partition("/")
            if kind_of_entry == kind:
                shapes[name] = tuple(entry["shape"])
        return shapes

    def require(self, key: str, shape: Sequence[int]) -> None:
        """Raise UserError unless the whole tensor `key` is there. Reads only the headers of its
        files."""
        entry = self.index["tensors"].get(key, {"chunks": ()})
        num_stored = 0
        for chunk in entry["chunks"]:
            chunk_shape = stored_shape(chunk)
            stored = self._open_tensor(chunk["file"], key)
            # the header has another shape if a file was replaced by another
            if stored.get_shape() == chunk_shape:
                num_stored += prod(chunk_shape)
        if num_stored != prod(shape):
            raise self._lacks_a_part(key)

    def read(self, kind: str, name: str) -> Tensor:
        """Return a whole logical tensor, in the dtype in which it was saved."""
        key = f"{kind}/{name}"
        shape = self.index["tensors"][key]["shape"]
        origin = [0] * len(shape)
        return self.rectangle(key, origin, shape)

    def read_range(
        self,
        kind: str,
        part: Part,
        first: int,
        last: int,
    ) -> Tensor:
        """Return elements [first, last) of the flattened slice `part` of a logical tensor, flat.
        Reads only the rows that contain them. kind: weight, exp_avg, exp_avg_sq or another."""
        if not part.shape:
            return self.read(kind, part.name).reshape(1)
        row_shape = part.local[1:]
        row_size = prod(row_shape)
        # full rows: a rectangle cannot begin in the middle of one
        first_row = first // row_size
        end_row = -(-last // row_size)  # rounded up
        offset = [0] * len(part.shape)
        if part.dim is not None:
            offset[part.dim] = part.start
        offset[0] += first_row
        rows_shape = (end_row - first_row, *row_shape)
        rows = self.rectangle(f"{kind}/{part.name}", offset, rows_shape)
        skipped = first_row * row_size
        return rows.reshape(-1)[first - skipped : last - skipped]

    def rectangle(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the rectangle [*shape] at `offset` of the tensor `key`, assembled from its
        chunks."""
        assembled: Tensor | None = None
        filled = 0
        for overlap in self._overlaps(key, offset, shape):
            values = overlap.values
            if list(values.shape) == list(shape):
                return values  # the usual case, without a copy
            if assembled is None:
                assembled = torch.empty(*shape, dtype=values.dtype)
            assembled[_slices(overlap.start, overlap.stop, offset)] = values
            filled += values.numel()
        if assembled is None or filled != prod(shape):
            raise self._lacks_a_part(key)
        return assembled

    def _overlaps(
        self, key: str, offset: Sequence[int], shape: Sequence[int]
    ) -> Iterator["_Overlap"]:
        """Yield the parts of a rectangle that the chunks have."""
        end = _add(offset, shape)
        dims = len(shape)
        for chunk in self.index["tensors"][key]["chunks"]:
            has_dims = len(chunk["offset"]) == len(chunk["shape"]) == dims
            if not has_dims:
                raise UserError.of("checkpoint.part_dims", path=self.path, index=INDEX, key=key)
            for block in blocks(chunk):
                block_end = _add(block.offset, block.shape)
                start = list(map(max, offset, block.offset))
                stop = list(map(min, end, block_end))
                if all(map(lt, start, stop)):
                    values = self._read_part(key, chunk, block, start, stop)
                    yield _Overlap(values, start, stop)

    def _read_part(
        self,
        key: str,
        chunk: dict[str, Any],
        block: StoredBlock,
        start: list[int],
        stop: list[int],
    ) -> Tensor:
        """Return indices [start, stop) along each dim of a logical tensor, which lie in one
        rectangle of a chunk. Of a chunk that is stored flat, only the rows that contain them are
        read."""
        stored = self._open_tensor(chunk["file"], key)
        if stored.get_shape() != stored_shape(chunk):
            raise self._lacks_a_part(key)
        in_block = _slices(start, stop, block.offset)
        if not chunk.get("range"):
            return stored[in_block]
        if not block.shape:  # a scalar, stored as one element
            return stored[block.start : block.start + 1].view(())
        row_shape = block.shape[1:]
        row_size = prod(row_shape)
        wanted_rows, *in_row = in_block
        first = block.start + wanted_rows.start * row_size
        last = block.start + wanted_rows.stop * row_size
        rows = stored[first:last].view(-1, *row_shape)
        return rows[:, *in_row]

    def _lacks_a_part(self, key: str) -> UserError:
        return UserError.of("checkpoint.part_missing", path=self.path, key=key)

    def _open_tensor(self, file: str, key: str) -> Any:
        """Return safetensors' lazy slice of a stored tensor: indexing reads from the file."""
        kind, name = key.split("/", 1)
        # In the files weights have their logical names alone.
        name_in_file = name if kind == "weight" else key
        try:
            if file not in self._open:
                path = self.file(file)
                is_here = not is_remote(path)
                self._open[file] = safe_open(path, "pt") if is_here else RemoteShard(path)
            return self._open[file].get_slice(name_in_file)
        except (OSError, SafetensorError) as error:
            raise UserError.of(
                "checkpoint.part_range", path=self.path / file, error=error
            ) from error


class _Overlap(NamedTuple):
    """The part of a requested rectangle that one chunk has.

    values: its elements.
    start, stop: its first index, and its last + 1, in the logical tensor, along each dim.
    """

    values: Tensor
    start: list[int]
    stop: list[int]


def _slices(start: Sequence[int], stop: Sequence[int], offset: Sequence[int]) -> tuple[slice, ...]:
    """Return the indices [start, stop) of a logical tensor in a rectangle of it at `offset`."""
    first_indices = map(sub, start, offset)
    end_indices = map(sub, stop, offset)
    return tuple(map(slice, first_indices, end_indices))


def _add(offset: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return the end of a rectangle along each dim."""
    return list(map(add, offset, shape))


def _sizes_of(path: Path) -> Callable[[str], int | None]:
    """Return a function that returns the bytes of a file of a checkpoint by its name, None if there
    is no such file. Raises UserError for a URL whose server does not say."""
    if not is_remote(path):
        return lambda name: _size(path / name)
    try:
        return sizes(path).get
    except PlaceError as error:
        raise UserError.of(
            "checkpoint.url_failed", url=error.filename, reason=error.reason
        ) from error


def _size(file: Path) -> int | None:
    """Return the bytes of a regular file, None if there is none."""
    try:
        status = file.stat()
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _read_index(path: Path) -> tuple[bytes, Any]:
    """Return the bytes of checkpoint.json, and the value that they parse to."""
    file = path / INDEX
    try:
        content = read_file(file)
        return content, parse_json(content)
    except PlaceError as error:
        raise UserError.of(
            "checkpoint.url_failed", url=error.filename, reason=error.reason
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError.of(
            "checkpoint.not_a_checkpoint", path=path, index=INDEX, reason=reason
        ) from error


def _require_known_format(path: Path, index: Any) -> None:
    """Raise UserError unless the format is known. Every index that names the training data must
    also have digests."""
    version = index.get("format") if isinstance(index, dict) else None
    is_number = type(version) is int  # neither a float nor True
    if is_number and version > FORMAT:
        raise newer_version(
            path, f"has checkpoint format {version}, and this one reads up to {FORMAT}"
        )
    if not is_number or version < 1:
        raise UserError.of("checkpoint.unknown_format", path=path, version=version, format=FORMAT)
    # every version that wrote "data" also wrote digests
    if "data" in index and FILE_DIGESTS not in index:
        raise UserError.of("checkpoint.digests_lost", path=path, index=INDEX)


def newer_version(path: Path, why: str) -> UserError:
    """Return the error for a checkpoint that a newer version of megaprec saved."""
    return UserError.of("checkpoint.newer_version", path=path, why=why)
