"""Notes on the tokens that stand before and after documents in training, where they are not what
one would think."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from megaprec.data.document_tokens import DocumentTokens, WithBeginTokens
from megaprec.data.indexed import IndexedDataset
from megaprec.data.tokenizer import Tokenizer
from tools.config.run_file import RunConfig
from tools.convert.initial import initial_model


def begin_notes(
    config: RunConfig,
    streams: Sequence[IndexedDataset],
    begin: int | None,
    documents: DocumentTokens,
    tokenizer: Tokenizer | None,
) -> Iterator[str]:
    """Yield the notes of a run.

    streams: its data sets as they are trained on. begin: the token that data.begin asks for.
    documents: the tokens that the model sees around documents.
    """
    if begin is not None:
        yield from _begin_token_notes(config, streams, begin)
    elif config.data.begin == "none" and config.train.init_from:
        # The user has decided against the token of the weights, and may not know its effect.
        initial = initial_model(Path(config.train.init_from))
        if initial.begin not in (None, documents.begin):
            yield (
                'data.begin = "none": the weights of train.init_from were trained with token '
                f"{initial.begin} before documents ({initial.origin}), and documents have none "
                "here"
            )
    elif documents.begin not in (None, documents.end):
        yield (
            f"documents begin with token {documents.begin} in the data; evaluation and export put "
            "it there, too"
        )
    if tokenizer and tokenizer.eos is not None and documents.end is None:
        evaluated_with = "no token" if documents.begin is None else f"token {documents.begin}"
        yield (
            f"documents do not end with token {tokenizer.eos}, which ends them by "
            f"{tokenizer.path}: the model does not learn where a text ends, and is evaluated with "
            f"{evaluated_with} before a document, as it is trained"
        )


def _begin_token_notes(
    config: RunConfig, streams: Sequence[IndexedDataset], begin: int
) -> Iterator[str]:
    """Yield a note on each way in which the begin token comes to stand before documents."""
    origin = config.origin("data.begin")
    setting = f"data.begin = {begin} ({origin})"
    if any(isinstance(stream, WithBeginTokens) for stream in streams):
        yield (
            f"{setting}: this token is put before each document, in evaluation, generation and "
            "export, too"
        )
    have_it = [str(stream.prefix) for stream in streams if not isinstance(stream, WithBeginTokens)]
    if have_it:
        yield (
            f"{setting}: documents of {', '.join(have_it)} begin after this token already; none "
            "is added"
        )
