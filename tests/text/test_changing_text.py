"""A text that changes while it is built is refused, and so is one that ends before its size."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megaprec.text.build import Progress, prepare, reusable
from megaprec.text.sources import open_source
from megaprec.text.tokenizer import Tokenizer, load_tokenizer
from megaprec.text.training import train_sentencepiece
from tests.refusals import raises
from tests.tokens.ranged_server import Conduct, serving

TEXT = "good text number one\n" * 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = [f"good text number {number}, of some length" for number in range(200)]
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(train_sentencepiece(texts, folder / "small", 300, False))


def once(change: Callable[[], object]) -> Progress:
    """What is told of progress: makes the change at the first report."""
    changes = [change]

    def report(documents: int, chars: int, tokens: int) -> None:
        if changes:
            changes.pop()()

    return report


def written_over(path: Path) -> None:
    """Other content of the same size and time."""
    state = path.stat()
    path.write_text(TEXT.replace("good", "evil"))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def appended(path: Path) -> None:
    with path.open("a") as file:
        file.write("more\n")


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [written_over, appended, removed])
@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_file_that_changes_while_it_is_built_is_refused(
    change: Callable[[Path], None], place: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    path = folder / "text.txt"
    path.write_text(TEXT)
    (folder / "z.txt").write_text(TEXT)
    source = open_source(str(path if place == "file" else folder))
    prefix = tmp_path / "tokens"
    with raises("data.text_changed", name=source.name):
        prepare(source, prefix, tokenizer=tokenizer.path, on_progress=once(lambda: change(path)))
    assert not [*tmp_path.glob("tokens*")]


def test_a_text_that_is_damaged_by_a_change_is_told_as_changed(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('{"text": "good text"}\n' * 60_000)
    second.write_text('{"text": "good text"}\n')
    source = open_source([str(first), str(second)])
    change = once(lambda: second.write_text('{"text": '))
    with raises("data.text_changed", name=source.name):
        prepare(source, tmp_path / "tokens", tokenizer=tokenizer.path, on_progress=change)


@pytest.mark.parametrize("has_tags", [True, False])
def test_a_file_at_a_url_that_changes_while_it_is_built_is_refused(
    has_tags: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Of a server without tags only another size is noticed."""
    folder = tmp_path / "served"
    folder.mkdir()
    path = folder / "text.txt"
    path.write_text(TEXT)
    change = written_over if has_tags else appended
    prefix = tmp_path / "tokens"
    with serving(folder, Conduct(has_tags=has_tags)) as url:
        source = open_source(f"{url}/text.txt")
        with raises("data.text_changed", name=source.name):
            prepare(
                source, prefix, tokenizer=tokenizer.path, on_progress=once(lambda: change(path))
            )
        assert not [*tmp_path.glob("tokens*")]
        prepare(source, prefix, tokenizer=tokenizer.path)
        assert reusable(prefix, open_source(f"{url}/text.txt"), tokenizer)
        path.write_text(TEXT.replace("good", "food" if has_tags else "another"))
        assert reusable(prefix, open_source(f"{url}/text.txt"), tokenizer) is None


@pytest.mark.parametrize("name", ["text.txt", "rows.jsonl", "text.txt.gz"])
@pytest.mark.parametrize("cut", [1, 3000])
def test_a_file_of_which_a_server_gives_less_than_its_size_is_no_whole_text(
    name: str, cut: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    content = TEXT.encode()
    if name == "rows.jsonl":
        content = b'{"text": "good text"}\n' * 300
    if name.endswith(".gz"):
        content = gzip.compress(content, 0)
    (tmp_path / name).write_bytes(content)
    with serving(tmp_path, Conduct(cut=cut)) as url:
        source = open_source(f"{url}/{name}")
        with raises("data.url_size_differs", url=f"{url}/{name}"):
            prepare(source, tmp_path / "tokens", tokenizer=tokenizer.path)
