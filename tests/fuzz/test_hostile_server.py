"""A server that sends without an end, packed, slowly or not at all is told in one line."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megaprec.errors import UserError
from megaprec.resources import peak_memory
from megaprec.text.sources import open_source
from megaprec.tokens import bounds, http_bounds
from tests.fuzz.hostile_server import CONDUCTS, serving

MEMORY = 512 << 20  # bytes; a list of files of 64 MiB is looked through


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as server:
        yield server


@pytest.mark.cases(4, sample=4)
@pytest.mark.parametrize("conduct", CONDUCTS)
def test_a_hostile_server_is_told_in_one_line(
    conduct: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SILENCE", "ANSWER"):
        monkeypatch.setattr(http_bounds, name, 1.0)
    # bytes a second: what comes byte by byte is too slow at once
    monkeypatch.setattr(http_bounds, "LEAST_SPEED", 1 << 30)
    monkeypatch.setattr(bounds, "SLOW_SECONDS", 1.0)
    before = peak_memory()
    with pytest.raises(UserError) as caught:
        for _ in open_source(f"{url}/{conduct}/{tmp_path.name}.txt"):
            pass
    assert len(caught.value.problems) == 1
    assert url in str(caught.value)
    assert peak_memory() - before < MEMORY
