"""A stream with begin tokens is the documents, each with its begin token, back to back."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprec.tokens.document_tokens import (
    DocumentTokens,
    WithBeginTokens,
    document_tokens,
    with_begin,
)
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from tests.refusals import raises

BEGIN = 90


def written(folder: Path, documents: list[list[int]]) -> IndexedDataset:
    with IndexedWriter(folder / "x", 100) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(folder / "x")


@settings(deadline=None, max_examples=30)
@given(
    documents=st.lists(st.lists(st.integers(0, 80), max_size=5), min_size=1, max_size=6),
    data=st.data(),
)
def test_a_stream_with_begin_tokens_is_each_document_after_its_begin_token(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], data: st.DataObject
) -> None:
    begun = WithBeginTokens(written(tmp_path_factory.mktemp("begun"), documents), BEGIN)
    whole = [[BEGIN, *document] for document in documents]
    flat = [token for document in whole for token in document]
    numbers = [number for number, document in enumerate(whole) for _ in document]
    assert begun.num_tokens == len(flat)
    assert begun.document_lengths().tolist() == [len(document) for document in whole]
    assert [begun.document(number).tolist() for number in range(len(whole))] == whole
    start = data.draw(st.integers(0, len(flat) - 1))
    length = data.draw(st.integers(1, len(flat) - start))
    assert begun.tokens(start, length).tolist() == flat[start : start + length]
    assert begun.documents_of(start, length).tolist() == numbers[start : start + length]
    assert begun.token_range() == (min(flat), max(flat))
    assert begun.first_outside(BEGIN) == 0
    if flat[start] != BEGIN:
        stored = np.concatenate([np.array(document, int) for document in documents])
        assert stored[begun.stored_place(start)] == flat[start]


def test_a_data_set_that_has_the_token_before_its_documents_is_taken_as_it_is(
    tmp_path: Path,
) -> None:
    there = written(tmp_path, [[BEGIN, 1, 2], [BEGIN, 3]])
    assert with_begin(there, BEGIN) is there
    ended = written(tmp_path, [[1, 2, 7], [3, 7]])
    assert with_begin(ended, 7) is ended, "the end of the document before is the begin token"
    assert isinstance(with_begin(ended, BEGIN), WithBeginTokens)
    with raises("data.begin_token_mixed", begin=1):
        with_begin(ended, 1)


def test_what_stands_before_documents_is_what_a_model_sees_there(tmp_path: Path) -> None:
    ended = written(tmp_path, [[1, 2, 7], [3, 7]])
    assert document_tokens(ended, BEGIN, 7) == DocumentTokens(7, 7)
    assert document_tokens(WithBeginTokens(ended, BEGIN), BEGIN, 7) == DocumentTokens(BEGIN, 7)
    assert document_tokens(ended, None, 9) == DocumentTokens(None, None), (
        "no document ends with the token"
    )
