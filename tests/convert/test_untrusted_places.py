"""Values of torch files are read where they lie: a file that was packed anew or damaged is refused,
not misread."""

import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch._utils import _rebuild_tensor_v2

from megaprec.errors import UserError
from tests.other_systems import write_folder
from tests.refusals import raises, sentence
from tools.convert.core.torch_files import distributed_contents, tensors_in
from tools.convert.core.untrusted import FilePart, describe
from tools.convert.formats import open_source

here = pytest.mark.usefixtures("torch_files_read_here")
STORED = zipfile.ZIP_STORED
DEFLATED = zipfile.ZIP_DEFLATED


def packed_anew(
    file: Path, change: Callable[[str, bytes], bytes | None], how: int = STORED
) -> None:
    """Pack the archive again as other programs do, with entries changed or left out."""
    with zipfile.ZipFile(file) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(file, "w", how) as archive:
        for name, content in entries:
            if (changed := change(name, content)) is not None:
                archive.writestr(name, changed)


def lost(name: str, content: bytes) -> bytes | None:
    return None if name.endswith("data/1") else content


def short(name: str, content: bytes) -> bytes:
    return content[:-4] if name.endswith("data/1") else content


def turned(name: str, content: bytes) -> bytes:
    return b"big" if name.endswith("byteorder") else content


@pytest.mark.parametrize(
    ("change", "how", "said"),
    [
        (lambda _, content: content, STORED, "do not lie where torch.save puts them"),
        (lambda _, content: content, DEFLATED, "its values are compressed"),
        (lost, STORED, "do not lie where torch.save puts them"),
        (short, STORED, "do not lie where torch.save puts them"),
        (turned, STORED, "in the other order"),
    ],
)
def test_a_file_that_was_packed_anew_is_refused(
    change: Any, how: int, said: str, tmp_path: Path
) -> None:
    torch.save({"a": torch.randn(100, 9), "b": torch.randn(50, 7)}, tmp_path / "file.pt")
    packed_anew(tmp_path / "file.pt", change, how)
    with pytest.raises(ValueError, match=said):
        describe(tmp_path / "file.pt")


def test_a_file_that_is_cut_short_is_told_so(tmp_path: Path) -> None:
    torch.save({"a": torch.randn(100, 9)}, tmp_path / "file.pt")
    content = (tmp_path / "file.pt").read_bytes()
    for kept in (len(content) - 30, len(content) // 2, 40):
        (tmp_path / "file.pt").write_bytes(content[:kept])
        with pytest.raises(ValueError, match="it was not saved or fetched whole"):
            describe(tmp_path / "file.pt")


def test_values_that_are_conjugated_when_they_are_read_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.tensor([1j]).conj()}, tmp_path / "file.pt")
    with pytest.raises(ValueError, match="no values that could be read as they lie"):
        describe(tmp_path / "file.pt")


class Crafted:
    """A tensor of a storage of six numbers, of any shape and place that a pickle may give it."""

    def __init__(
        self, start: int, size: tuple[int, ...], strides: tuple[int, ...], sign: bool = False
    ) -> None:
        six = torch.arange(6.0).untyped_storage()
        whole = torch.storage.TypedStorage(wrap_storage=six, dtype=torch.float32, _internal=True)
        self.said = (
            whole,
            start,
            size,
            strides,
            False,
            OrderedDict(),
            *([{"neg": True}] if sign else []),
        )

    def __reduce__(self) -> Any:
        return _rebuild_tensor_v2, self.said


@here
def test_a_tensor_is_within_its_values(tmp_path: Path) -> None:
    for good in (
        Crafted(0, (6,), (1,)),
        Crafted(2, (2, 2), (1, 2)),
        Crafted(5, (4,), (0,)),
        Crafted(6, (0,), (1,)),
    ):
        torch.save({"a": good, "b": torch.ones(9)}, tmp_path / "file.pt")
        expected = torch.load(tmp_path / "file.pt")["a"]
        assert torch.equal(tensors_in(tmp_path / "file.pt")["a"].read(), expected)
    beyond = Crafted(0, (7,), (1,)), Crafted(4, (2, 2), (1, 2)), Crafted(6, (1,), (1,))
    for bad in (*beyond, Crafted(0, (2,), (1,), True)):
        torch.save({"a": bad, "b": torch.ones(9)}, tmp_path / "file.pt")
        with pytest.raises(ValueError, match=r"a tensor in it|do not lie where"):
            describe(tmp_path / "file.pt")


@here
@pytest.mark.parametrize("key", [7, b"name", None, (1, 2), True])
def test_what_is_no_name_is_not_left_out(key: Any, tmp_path: Path) -> None:
    hf = write_folder(tmp_path / "hf", "llama")
    torch.save(
        {**load_file(hf / "model.safetensors"), key: torch.zeros(2)}, hf / "pytorch_model.bin"
    )
    (hf / "model.safetensors").unlink()
    refusals = (sentence("convert.state_key_not_name"), sentence("convert.tensor_surplus"))
    with pytest.raises(UserError, match="|".join(refusals)):
        open_source(hf)


def test_keys_that_would_become_one_are_refused(tmp_path: Path) -> None:
    torch.save({"a, b": 1, ("a", "b"): 2}, tmp_path / "file.pt")
    with pytest.raises(ValueError, match="two keys"):
        describe(tmp_path / "file.pt")


@here
def test_what_is_no_tensor_is_named(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.zeros(2)}}, tmp_path / "file.pt")
    with raises("convert.state_value_not_tensor", name="state_dict"):
        tensors_in(tmp_path / "file.pt")


def flipped(file: Path, values: torch.Tensor, at: int = -1) -> None:
    """Turn a bit of a byte of values that lie in a file; of the last one, unless told."""
    content = bytearray(file.read_bytes())
    lie = values.numpy().tobytes()
    assert content.count(lie) == 1
    content[content.index(lie) + at % len(lie)] ^= 1
    file.write_bytes(content)


@here
def test_values_that_are_not_those_that_were_saved_are_refused(tmp_path: Path) -> None:
    held = {"a": torch.randn(100, 9), "b": torch.randn(50, 7)}
    held |= {"turned": torch.randn(8, 5).t(), "some": torch.randn(9)[2:]}
    file = tmp_path / "file.pt"
    torch.save(held, file)
    assert all(torch.equal(one.read(), held[name]) for name, one in tensors_in(file).items())
    flipped(file, held["a"])
    flipped(file, held["turned"].t())
    found = tensors_in(file)
    for damaged in (found["a"].read, found["turned"].read, lambda: found["a"].rows(0, 2)):
        with raises("convert.crc_differs"):
            damaged()
    assert torch.equal(found["b"].rows(0, 50), held["b"]) and torch.equal(
        found["a"].rows(3, 9), held["a"][3:9]
    )


@here
def test_the_first_part_of_a_tensor_is_read_only_if_all_of_it_is_sound(tmp_path: Path) -> None:
    values = torch.randn(6, 4, 5)
    file = tmp_path / "file.pt"
    torch.save({"a": values}, file)
    for broken in (False, True):
        if broken:
            flipped(file, values)
        whole = tensors_in(file)["a"]
        first = whole.part((4, 5), whole.start)
        other = whole.part((4, 5), whole.start + 4 * 5 * 4)
        rows = first.part((2, 5), first.start)
        assert torch.equal(other.read(), values[1])
        for part in (first, rows):
            if broken:
                with raises("convert.crc_differs"):
                    part.read()
            else:
                assert torch.equal(part.read(), values[0][: part.shape[0]])


@here
def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    values = torch.randn(100, 9)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": values}, tmp_path / "file.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(tensors_in(tmp_path / "file.pt")["a"].read(), values)


@here
@pytest.mark.filterwarnings("ignore")  # torch's, about saving without ranks
def test_the_values_of_a_distributed_checkpoint_are_not_read_to_find_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"a": torch.randn(1 << 18), "b": torch.randn(300, 7).t()}
    read = 0
    plain = FilePart.readinto
    dcp.save(held, checkpoint_id=tmp_path / "there", no_dist=True)

    def counting(self: FilePart, buffer: Any) -> int:
        nonlocal read
        done = plain(self, buffer)
        read += done
        return done

    monkeypatch.setattr(FilePart, "readinto", counting)
    found, _ = distributed_contents(tmp_path / "there")
    assert 0 < read < held["a"].nbytes / 4
    assert all(
        torch.equal(entry["chunks"][0][1].read(), held[name]) for name, entry in found.items()
    )
