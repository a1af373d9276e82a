"""Notes on a run's data: on its tokenizer, and on the tokens before and after documents."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.text.tokenizer import FILE_DIGEST, TOKENS_DIGEST, Tokenizer, has_built
from megaprec.tokens.copies import file_here
from megaprec.tokens.document_tokens import DocumentTokens, WithBeginTokens
from megaprec.tokens.indexed import IndexedDataset
from megaprec.tokens.intact import read_record
from megaprec.tokens.places import path_of
from megaprec.tokens.samples import Samples
from megaprec.url_secrets import masked
from tools.config.run_file import RunConfig
from tools.config.tables.data_settings import Data
from tools.parts import optional_parts


def tokenizer_notes(
    prefix: Path, record: dict[str, Any] | None, tokenizer: Tokenizer | None
) -> Iterator[str]:
    """Yield notes on a data set and the tokenizer of a run.

    prefix: path of the data set without .bin. record: what its build has recorded, if anything.
    Raises UserError if the data set was built with another tokenizer than the one that lies beside
    it.
    """
    if tokenizer:
        yield from tokenizer.notes
    if record is None:
        return
    # Counted by the build; a few are normal, many mean another language or tokenizer.
    if unknown := record.get("unknown"):
        yield f"{prefix}: {unknown:,} of {record.get('tokens', 0):,} tokens stand for unknown text"
    if tokenizer is None:
        return
    is_same = has_built(tokenizer, record)
    # The file beside a data set must be its tokenizer; another one may have the same tokens.
    if not is_same and tokenizer.path == file_here(prefix, ".model"):
        raise UserError.of("training.tokenizer_of_data_differs", path=tokenizer.path)
    if is_same is None:
        yield (
            f"{tokenizer.path} is not the file that {prefix} was built with: their tokens must "
            "mean the same"
        )
    elif not is_same:
        yield (
            f"{tokenizer.path} is not the tokenizer that {prefix} was built with: equal ids mean "
            "other tokens"
        )
    if "eos" in record and record["eos"] != tokenizer.eos:
        built_with = _describe_token(record["eos"])
        now = _describe_token(tokenizer.eos)
        yield (
            f"{prefix} was built with {built_with} at the end of each document, but "
            f"{tokenizer.path} and the settings beside it now say {now}: build it again, or set "
            "them back"
        )


def different_tokenizer_notes(records: Mapping[Path, dict[str, Any] | None]) -> Iterator[str]:
    """Yield a note if data sets were built with different tokenizers.

    records: what the builds have recorded, by prefix of the data set; a set without a record is
    passed over.
    """
    built = [(prefix, record) for prefix, record in records.items() if record]
    if not built:
        return
    first_prefix, first = built[0]
    for prefix, record in built:
        # Records of earlier builds have the digest of the file alone.
        same_file = record.get(FILE_DIGEST) == first.get(FILE_DIGEST)
        same_meaning = TOKENS_DIGEST in record and record[TOKENS_DIGEST] == first.get(TOKENS_DIGEST)
        if not same_file and not same_meaning:
            yield (
                f"{first_prefix} and {prefix} were built with different tokenizers: their tokens "
                "must mean the same"
            )
            return


def _describe_token(token: int | None) -> str:
    return "no token" if token is None else f"token {token}"


def begin_notes(
    config: RunConfig,
    streams: Sequence[IndexedDataset],
    begin_token: int | None,
    documents: DocumentTokens,
    tokenizer: Tokenizer | None,
) -> Iterator[str]:
    """Yield notes on the tokens before and after the documents of a run.

    streams: its data sets as they are trained on. begin_token: the token that data.begin asks for.
    documents: the tokens that the model sees around documents.
    """
    if begin_token is not None:
        yield from _begin_token_notes(config, streams, begin_token)
    elif config.data.begin == "none" and config.train.init_from:
        # The user has decided against the token of the weights, and may not know its effect.
        initial = optional_parts.initial_model(path_of(config.train.init_from), config.model)
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
    are_chats = all(stream.has_mask for stream in streams)  # a template writes their ends
    if tokenizer and tokenizer.eos is not None and documents.end is None and not are_chats:
        evaluated_with = _describe_token(documents.begin)
        yield (
            f"documents do not end with token {tokenizer.eos}, which ends them by "
            f"{tokenizer.path}: the model does not learn where a text ends, and is evaluated with "
            f"{evaluated_with} before a document, as it is trained"
        )


def _begin_token_notes(
    config: RunConfig, streams: Sequence[IndexedDataset], begin_token: int
) -> Iterator[str]:
    """Yield a note on each way in which the begin token comes to stand before documents."""
    # left open, it is the token that the checkpoint's run had
    is_open = config.data.begin == "auto"
    origin = "the checkpoint" if is_open else config.origin("data.begin")
    setting = f"data.begin = {begin_token} ({origin})"
    if any(isinstance(stream, WithBeginTokens) for stream in streams):
        yield (
            f"{setting}: this token is put before each document, in evaluation, generation and "
            "export, too"
        )
    have_it = list[str]()
    for name, stream in zip(config.data.sources, streams, strict=True):
        if not isinstance(stream, WithBeginTokens):
            have_it.append(masked(name))
    if have_it:
        yield (
            f"{setting}: documents of {', '.join(have_it)} begin after this token already; none "
            "is added"
        )


def loss_mask_notes(data: Data, parts: Sequence[Samples]) -> Iterator[str]:
    """Yield a note on each data set with a loss mask: which tokens count. parts: the training
    samples of each data set."""
    for source, samples in zip(data.sources, parts, strict=True):
        name = masked(source)
        dataset = samples.dataset
        if not dataset.has_mask:
            continue
        setting = f'data.loss_on = "{data.loss_on}"'
        if data.loss_on == "all":
            yield f"{setting}: all tokens of {name} count, also those beside its answers"
            continue
        record = read_record(dataset.prefix) or {}
        counted = "the answers"
        if "counted" in record:
            counted = f"{record['counted']:,} of {record['tokens']:,} tokens, the answers,"
        line = f"{setting}: {counted} of {name} count in the loss"
        if without := samples.count_without_target():
            line += f"; {without:,} of {samples.num_different:,} samples hold none of them"
        yield line
