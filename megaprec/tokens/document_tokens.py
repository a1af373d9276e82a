"""The tokens that begin and end the documents of a data set, and a stream with a begin token before
each document.

Weights that were trained with a begin token expect it. Files of tokens mostly lack it, and need not
be written again: `WithBeginTokens` reads them as if it stood there.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaprec.errors import UserError
from megaprec.tokens.indexed import IndexedDataset

SAMPLED = 100  # documents that are looked at, spread over all of a data set

CHUNK = 1 << 20  # tokens that are read at a time


@dataclass(frozen=True)
class DocumentTokens:
    """The ids of the tokens before and after each document in training; None: there is none."""

    begin: int | None
    end: int | None


def share_with(
    dataset: IndexedDataset,
    token: int | None,
    index_in_document: int,
) -> float:
    """Return the share of the documents that have `token` at an index: 0 is their first token, -1
    their last.

    At most `SAMPLED` documents are looked at, always the same ones. Empty ones do not count.
    """
    if token is None or dataset.dtype.kind == "f":
        return 0.0
    count = dataset.num_documents
    if count > SAMPLED:
        numbers = [sample * count // SAMPLED for sample in range(SAMPLED)]
    else:
        numbers = range(count)
    num_documents = 0
    num_with_token = 0
    for number in numbers:
        document = dataset.document(number)
        if not len(document):
            continue
        num_documents += 1
        if document[index_in_document] == token:
            num_with_token += 1
    return num_with_token / num_documents if num_documents else 0.0


def with_begin(
    dataset: IndexedDataset,
    begin: int | None,
) -> IndexedDataset:
    """Return the data set with `begin` before each document, or as it is if that token is there
    anyway.

    It is if each document has it already, or if it ends the document before. Raises UserError if
    some documents have it and some do not.
    """
    if begin is None or not dataset.num_documents:
        return dataset
    # what ends a document stands before the next one
    if share_with(dataset, begin, -1) > 0.5:
        return dataset
    share = share_with(dataset, begin, 0)
    if share == 1:
        return dataset
    if share > 0:
        raise UserError.of("data.begin_token_mixed", prefix=dataset.prefix, begin=begin)
    return WithBeginTokens(dataset, begin)


def document_tokens(
    dataset: IndexedDataset,
    begin: int | None,
    end: int | None,
) -> DocumentTokens:
    """Return the tokens before and after documents in training on a data set, as `with_begin`
    returns it.

    begin: the token that was requested, or that the tokenizer names.
    end: the token that ends documents by the tokenizer.
    Without a begin token, the end of the document before is what stands before a document.
    """
    present_end = end if share_with(dataset, end, -1) > 0.5 else None
    present_begin = begin if share_with(dataset, begin, 0) == 1 else present_end
    return DocumentTokens(present_begin, present_end)


class _Span(NamedTuple):
    """Tokens [start, stop) of a stream, all of one document, by its number."""

    document: int
    start: int
    stop: int


class WithBeginTokens(IndexedDataset):
    """A data set in which the token `begin` stands before each document, which its files do not
    hold.

    Places and numbers of tokens count these tokens, too. Opening it reads no more than opening its
    files does.
    """

    def __init__(self, stored: IndexedDataset, begin: int) -> None:
        super().__init__(stored.prefix)
        self.begin = begin
        self.num_tokens += self.num_documents

    def document(self, index: int) -> NDArray[np.generic]:
        """Return the token ids of document `index`, its begin token first, int64, as a copy."""
        stored = super().document(index).astype(np.int64)
        return np.concatenate(([self.begin], stored))

    def document_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each document with its begin token, int64
        [num_documents]."""
        begins = np.append(self._pointers // self.dtype.itemsize, self._stored_tokens)
        return np.diff(begins[self._documents]) + 1

    def tokens(self, start: int, length: int) -> NDArray[np.int64]:
        """Return tokens [start, start + length) of all documents back to back, int64 [length], as a
        copy."""
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise UserError.of(
                "data.token_range_outside",
                start=start,
                stop=start + length,
                prefix=self.prefix,
                num_tokens=self.num_tokens,
            )
        self.require_integer_ids()
        ids = np.full(length, self.begin, np.int64)
        for place, stored_start, stored_stop in self._stored_within(start, length):
            ids[place] = self._stream[stored_start:stored_stop]
        return ids

    def prepare_spans(self, spans: Iterable[tuple[int, int]]) -> None:
        """Read what is at a URL of the tokens [start, stop) of each span at once."""
        stored_spans: list[tuple[int, int]] = []
        for start, stop in spans:
            for _, stored_start, stored_stop in self._stored_within(start, stop - start):
                stored_spans.append((stored_start, stored_stop))
        self._prepare_stored(stored_spans)

    def counted(self, start: int, length: int) -> NDArray[np.bool_]:
        """Return whether each of the tokens [start, start + length) counts in the loss, [length].

        With a mask begin tokens do not: no answer holds them.
        """
        counted = np.full(length, not self.has_mask)
        for place, stored_start, stored_stop in self._stored_within(start, length):
            stored_length = stored_stop - stored_start
            counted[place] = super().counted(stored_start, stored_length)
        return counted

    def _stored_within(self, start: int, length: int) -> Iterator[tuple[slice, int, int]]:
        """Yield (place, stored_start, stored_stop) for each document that has some of the tokens
        [start, start + length): tokens [stored_start, stored_stop) of the file are at `place` among
        these tokens. Begin tokens are at no place that is yielded."""
        for span in self._spans_within(start, length):
            first_stored = max(span.start, self._start_of(span.document) + 1)
            stop = max(span.stop, first_stored)
            # the file lacks the begin tokens of the documents before, and the document's own
            lacking = span.document + 1
            place = slice(first_stored - start, stop - start)
            yield place, first_stored - lacking, stop - lacking

    def documents_of(self, start: int, length: int) -> NDArray[np.int64]:
        """Return the document number of each of the tokens [start, start + length), int64
        [length]."""
        numbers = np.empty(length, np.int64)
        for span in self._spans_within(start, length):
            numbers[span.start - start : span.stop - start] = span.document
        return numbers

    def stored_place(self, token: int) -> int:
        """Return the place in the file of a token; of a begin token, that of the token after it."""
        # the begin tokens up to this document are not in the file
        number = self._document_at(token)
        return max(token, self._start_of(number) + 1) - number - 1

    def token_range(self) -> tuple[int, int]:
        """Return the smallest and largest token id. Reads the whole file in chunks."""
        low, high = super().token_range()
        if high < low:
            return self.begin, self.begin
        return min(low, self.begin), max(high, self.begin)

    def first_outside(self, vocab: int) -> int | None:
        """Return the position of the first token whose id is outside [0, vocab), None if there is
        none."""
        for start in range(0, self.num_tokens, CHUNK):
            chunk = self.tokens(start, min(CHUNK, self.num_tokens - start))
            outside = np.flatnonzero((chunk < 0) | (chunk >= vocab))
            if len(outside):
                return start + int(outside[0])
        return None

    def _start_of(self, number: int) -> int:
        """Return the place of the begin token of document `number`; the number of tokens for the
        one after the last."""
        if number == self.num_documents:
            return self.num_tokens
        sequence = int(self._documents[number])
        if sequence == self.num_sequences:  # of an empty document at the end
            stored_place = self._stored_tokens
        else:
            stored_place = int(self._pointers[sequence]) // self.dtype.itemsize
        return stored_place + number  # as many begin tokens stand before

    def _document_at(self, token: int) -> int:
        """Return the number of the document of a token."""
        return bisect_right(range(self.num_documents), token, key=self._start_of) - 1

    def _spans_within(self, start: int, length: int) -> list[_Span]:
        """Return the tokens [start, start + length), cut into the spans of documents."""
        spans: list[_Span] = []
        end = start + length
        span_start = start
        document = self._document_at(start) if length else 0
        while span_start < end:
            span_stop = min(self._start_of(document + 1), end)
            spans.append(_Span(document, span_start, span_stop))
            span_start = span_stop
            document += 1
        return spans

    @property
    def _stored_tokens(self) -> int:
        """Return the number of tokens in the file."""
        return self.num_tokens - self.num_documents
