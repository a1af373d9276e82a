"""Documents cut into windows, the samples of an evaluation, so that each of their tokens is
predicted exactly once.

A document is evaluated alone, with the token before it that the model has for this
(`DescribedModel.begin`). The token that ends it is no text and is not predicted. A document of more
tokens than a window has several windows. Each after the first predicts the next `stride` tokens
from the tokens before them, as many as the window holds: with a stride as long as the window from
at least one, with a shorter stride from at least `window - stride + 1`. The last window of a
document is filled up with earlier tokens. So do lm-evaluation-harness's rolling windows, whose
stride is the window.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megaprec.errors import UserError
from megaprec.text.readers import TextOptions
from megaprec.text.sources import open_source
from megaprec.text.token_bytes import NOT_KNOWN, bytes_of_tokens
from megaprec.text.tokenizer import Tokenizer
from megaprec.tokens.copies import is_there
from megaprec.tokens.indexed import IndexedDataset
from megaprec.tokens.intact import check_vocabulary, contents_of, read_record
from megaprec.tokens.places import path_of
from tools.inference.load import DescribedModel

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class TokenizedDocument:
    """The token ids of a document's text, int64 [n], and the number of bytes in UTF-8 of those that
    are predicted; None if unknown.

    counted: whether each token is scored, bool [n], by the loss mask of a data set; None: all are.
    """

    ids: Ids
    size: int | None
    counted: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Window:
    """A sample: each of `tokens` predicts the target at its place. Targets before `first` do not
    count.

    tokens, targets: int64 [n].
    counted: whether each target counts otherwise, bool [n]; None: all do.
    """

    tokens: Ids
    targets: Ids
    first: int
    counted: NDArray[np.bool_] | None = None

    @property
    def counts(self) -> NDArray[np.bool_]:
        """Return whether each target counts, bool [n]."""
        is_new = np.arange(len(self.targets)) >= self.first
        return is_new if self.counted is None else is_new & self.counted


def windows(
    ids: Ids,
    begin: int | None,
    length: int,
    stride: int,
    counted: NDArray[np.bool_] | None = None,
) -> Iterator[Window]:
    """Yield the windows of a document. Without a begin token its first token is not predicted.

    counted: whether each token counts, bool [n]; None: all do.
    """
    stream = ids
    target_counts = None if counted is None else counted[1:]
    if begin is not None:
        stream = np.concatenate(([begin], ids))
        target_counts = counted
    predicted = 0  # tokens that the windows so far predict
    to_predict = len(stream) - 1
    while predicted < to_predict:
        # The first window predicts as many tokens as it holds, the others `stride` each.
        predicted_here = stride if predicted else length
        end = min(predicted + predicted_here, to_predict)
        start = max(0, end - length)
        tokens = stream[start:end]
        targets = stream[start + 1 : end + 1]
        counts = None if target_counts is None else target_counts[start:end]
        yield Window(tokens, targets, predicted - start, counts)
        predicted = end


def read_documents(
    path: str, model: DescribedModel, options: TextOptions
) -> Iterable[TokenizedDocument]:
    """Return the documents of a text, of a folder of texts, or of a data set PREFIX.bin and
    PREFIX.idx.

    options: of a text.
    Raises UserError, at the latest when they are iterated.
    """
    if path.endswith((".bin", ".idx")):
        raise UserError.of("text.data_set_prefix", path=path, prefix=path[:-4])
    if is_there(path_of(path), ".idx"):
        if options.max_chars is not None:
            raise UserError.of("text.max_chars_of_tokens", path=path)
        dataset = IndexedDataset(path_of(path))
        vocab = model.config.vocab
        if model.tokenizer:
            vocab = min(model.tokenizer.vocab_size, vocab)
        check_vocabulary(dataset, contents_of(dataset), vocab)
        return _predicted_sizes(_documents_of_tokens(dataset, model), model)
    source = open_source(path, options)
    if model.tokenizer is None:
        raise UserError.of("text.text_without_tokenizer", path=path)
    documents = _documents_of_text(source, model.tokenizer)
    return _predicted_sizes(documents, model)


def _predicted_sizes(
    documents: Iterable[TokenizedDocument], model: DescribedModel
) -> Iterator[TokenizedDocument]:
    """Yield the documents with the size of what the model predicts of them, in bytes: without a
    begin token, all but the first token. The size is None where that token has no number of bytes.
    """
    if model.begin is not None:
        yield from documents
        return
    bytes_of = None
    if model.tokenizer:
        bytes_of = bytes_of_tokens(model.tokenizer, range(model.tokenizer.vocab_size))
    for document in documents:
        size = document.size
        if size is not None and len(document.ids):
            bytes_of_first = NOT_KNOWN
            if bytes_of is not None:
                bytes_of_first = int(bytes_of[document.ids[0]])
            size = size - bytes_of_first if bytes_of_first != NOT_KNOWN else None
        yield replace(document, size=size)


def _documents_of_text(
    pieces: Iterable[tuple[str, str]], tokenizer: Tokenizer
) -> Iterator[TokenizedDocument]:
    """Yield the documents of a text. pieces: (name of the document, some of its text), in order."""
    name = ""
    ids = list[Ids]()
    size = 0
    for document, text in pieces:
        if document != name and ids:
            yield TokenizedDocument(np.concatenate(ids), size)
            ids = []
            size = 0
        name = document
        ids.append(np.array(tokenizer.encode(text), np.int64))
        size += len(text.encode())
    if ids:
        yield TokenizedDocument(np.concatenate(ids), size)


def _documents_of_tokens(
    dataset: IndexedDataset, model: DescribedModel
) -> Iterator[TokenizedDocument]:
    """Yield the documents of a data set, without the tokens that stand around each."""
    size = _recorded_size(dataset)
    end = 0
    for number in range(dataset.num_documents):
        ids = dataset.document(number).astype(np.int64)
        start = end
        end += len(ids)
        if dataset.has_mask:
            # an end token may be a part of an answer, and the bytes of answers are not known
            counted = dataset.counted(start, len(ids))
            if len(ids) and ids[0] == model.begin:
                ids = ids[1:]
                counted = counted[1:]
            yield TokenizedDocument(ids, None, counted)
            continue
        if len(ids) and int(ids[-1]) in model.ends:
            ids = ids[:-1]
        if len(ids) and ids[0] == model.begin:  # it stands before each document anyway
            ids = ids[1:]
        if size is not None:
            # of all documents, with the first: only the sum is known
            yield TokenizedDocument(ids, 0 if number else size)
        elif model.tokenizer:
            text = model.tokenizer.decode(ids.tolist())
            yield TokenizedDocument(ids, len(text.encode()))
        else:
            yield TokenizedDocument(ids, None)


def _recorded_size(dataset: IndexedDataset) -> int | None:
    """Return the number of bytes of the text that a data set was built of, None if its build has
    not recorded it."""
    record = read_record(dataset.prefix)
    return record.get("bytes") if record else None
