"""Building of the tokenizer and the data sets of a run's texts, unless they are there."""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megaprec.checkpoint.reader import Store
from megaprec.durable import read_whole
from megaprec.errors import Problem, UserError
from megaprec.resources import cores
from megaprec.text.build import prepare, reusable
from megaprec.text.characters import CharacterTokenizer
from megaprec.text.sources import TextSource, has_digest
from megaprec.text.text_files import left_out_words
from megaprec.text.tokenizer import Tokenizer, load_tokenizer, loaded_once
from megaprec.text.training import learn_characters, train_sentencepiece
from megaprec.tokens.files import exclusive_lock, write_whole
from megaprec.tokens.places import STANDARD_LIBRARY
from tools.config.run_file import RunConfig
from tools.console.build_progress import build_progress, skipped_words
from tools.console.toml import toml
from tools.console.wrapped import say
from tools.saved.train_state import read_tokenizer
from tools.training.branch import is_branch, open_start
from tools.training.data_identity import DataSet, read_identity
from tools.training.data_sources import DataSource, data_folder, naming_settings, trained_tokenizer


@dataclass(frozen=True)
class _TextTokenizer:
    """The tokenizer of the texts of a run.

    file: its path, whether it exists or not. vocab_size: vocabulary size to train if it does not
    exist; None if it is given, or of characters. characters: it is learned, and of characters.
    saved: its copy in the run's newest checkpoint, if it must stay the same.
    """

    file: Path
    vocab_size: int | None
    characters: bool = False
    saved: Path | None = None

    @property
    def is_learned(self) -> bool:
        """Return True if it is learned from the texts."""
        return self.characters or self.vocab_size is not None

    @property
    def exists(self) -> bool:
        """Return True if the file exists and is the required tokenizer."""
        if not self.file.is_file():
            return False
        return self.saved is None or read_whole(self.file) == read_whole(self.saved)

    def has_built(self, source: DataSource, text: TextSource, by_content: bool = False) -> bool:
        """Return True if the data set of a text exists and is the one that would be built.

        by_content: a text whose file has another name or time is read and compared by its content.
        """
        tokenizer = loaded_once(self.file)
        if tokenizer is None:
            return False
        is_of_characters = isinstance(tokenizer, CharacterTokenizer)
        if self.is_learned and is_of_characters != self.characters:
            return False
        build = reusable(source.prefix, text, tokenizer, self.vocab_size, by_content)
        return build is not None


def build_texts(
    config: RunConfig,
    sources: Sequence[DataSource],
    tokenizer_file: Path | None,
    allowed: Collection[str],
) -> Path:
    """Build the tokenizer and the data sets of texts that are missing; return the tokenizer's file.

    One process at a time does so. Raises UserError.

    tokenizer_file: the existing one, None if it is to be trained. allowed: differences from the
    checkpoint's data that are accepted.
    """
    texts = dict[DataSource, TextSource]()
    for source in sources:
        with naming_settings(config, source):
            texts[source] = source.open_text(config.data, tokenizer_file)
    checkpoint = open_start(config)
    tokenizer = _tokenizer_of_texts(
        config, tokenizer_file, None if "tokenizer" in allowed else checkpoint
    )

    def is_built(source: DataSource, by_content: bool = False) -> bool:
        return tokenizer.exists and tokenizer.has_built(source, texts[source], by_content)

    if all(is_built(source) for source in sources):
        return tokenizer.file
    if checkpoint is not None and is_branch(config, checkpoint.path) and "data" not in allowed:
        # Before the lock, which makes the folder of a run that cannot begin.
        unbuilt = [source for source in sources if not is_built(source)]
        _require_unchanged_texts(unbuilt, texts, checkpoint)
    folder = data_folder(config)
    with exclusive_lock(folder / ".lock", partial(say_busy, folder), leave_none=True):
        # Asked again: another process may have built them while this one waited.
        missing = [source for source in sources if not is_built(source)]
        same_text = [source for source in missing if is_built(source, by_content=True)]
        _tell_same_texts(same_text)
        if len(same_text) < len(missing):
            _build_alone(config, texts, tokenizer, checkpoint, allowed)
    return tokenizer.file


def _tell_same_texts(sources: Sequence[DataSource]) -> None:
    """Say on stderr which texts are known by their content."""
    for source in sources:
        say(
            f"{source.key}: {toml(source.name)} has another name or time and is the same text",
            sys.stderr,
        )


def build_validation_set(
    config: RunConfig, source: DataSource, tokenizer: Tokenizer | None
) -> None:
    """Build the data set of a text of data.validation, unless it is there. Raises UserError."""
    if tokenizer is None:
        raise UserError.of("training.no_tokenizer")
    text = source.open_text(config.data, tokenizer.path)
    if reusable(source.prefix, text, tokenizer):
        return
    # The lock is that of the training data: both are built in this folder.
    folder = data_folder(config)
    with exclusive_lock(folder / ".lock", partial(say_busy, folder), leave_none=True):
        _build_data_set(config, source, text, tokenizer.path)


def say_busy(folder: Path) -> None:
    """Say on stderr that this process waits for another one, which builds data in `folder`."""
    print(
        f"waiting for another process, which builds data in {folder}", file=sys.stderr, flush=True
    )


def _tokenizer_of_texts(
    config: RunConfig, tokenizer_file: Path | None, checkpoint: Store | None
) -> _TextTokenizer:
    """Return the tokenizer of texts. Raises UserError.

    tokenizer_file: the existing one. checkpoint: to resume from, whose tokenizer must stay.
    """
    if tokenizer_file:
        return _TextTokenizer(tokenizer_file, None)
    saved = read_tokenizer(checkpoint) if checkpoint else None
    of_characters = config.data.of_characters
    if checkpoint is None or saved is None:
        vocab_size = None if of_characters else config.data.vocab_size
        return _TextTokenizer(trained_tokenizer(config), vocab_size, of_characters)

    remedy = (
        f"set data.tokenizer to a copy of {saved}, or give --allow tokenizer to have another one "
        "learned"
    )
    if saved.suffix != ".model":
        raise UserError.of("training.tokenizer_lost", path=checkpoint.path, remedy=remedy)
    saved_tokenizer = load_tokenizer(saved)
    if isinstance(saved_tokenizer, CharacterTokenizer) != of_characters:
        raise UserError.of(
            "training.characters_differ",
            value=toml(config.data.tokenizer),
            path=checkpoint.path,
            remedy=remedy,
        )
    size = saved_tokenizer.vocab_size
    if not of_characters and size != config.data.vocab_size:
        raise UserError.of(
            "training.vocabulary_differs",
            vocab_size=config.data.vocab_size,
            size=size,
            remedy=remedy,
        )
    return _TextTokenizer(trained_tokenizer(config), None, saved=saved)


def _build_alone(
    config: RunConfig,
    texts: Mapping[DataSource, TextSource],
    tokenizer: _TextTokenizer,
    checkpoint: Store | None,
    allowed: Collection[str],
) -> None:
    """Build the tokenizer and the data sets, while no other process does.

    texts: all of the run, of which some may be built already.
    """
    # What is built is compared with the checkpoint by its tokens, later (`check_resumable`).
    missing = [source for source, text in texts.items() if not tokenizer.has_built(source, text)]
    problems = [*_cache_problems(config, missing, tokenizer)]
    if checkpoint is not None and "data" not in allowed:
        problems = [*_changed_texts(missing, texts, checkpoint), *problems]
    if problems:
        raise UserError(*problems)

    if tokenizer.saved and not tokenizer.exists:
        # Not learned again: another version of the library might learn other tokens.
        write_whole(tokenizer.file, read_whole(tokenizer.saved))
        print(f"restored {tokenizer.file} from {tokenizer.saved}", file=sys.stderr, flush=True)
    elif tokenizer.is_learned:
        _learn_tokenizer(config, texts, tokenizer)
    # `prepare` leaves a data set as it is if it is the one that would be built.
    for source, text in texts.items():
        with naming_settings(config, source):
            _build_data_set(config, source, text, tokenizer.file)


def _learn_tokenizer(
    config: RunConfig, texts: Mapping[DataSource, TextSource], tokenizer: _TextTokenizer
) -> None:
    """Write the tokenizer of the texts: their characters, or pieces of data.vocab_size. What is
    wrong with a text is told with that text's own key."""
    unreadable: list[DataSource] = []  # the one whose documents raised UserError, if any

    def documents() -> Iterator[str]:
        for source, text in texts.items():
            try:
                for _, document in text:
                    yield document
            except UserError:
                unreadable.append(source)
                raise

    may_replace = not config.data.cache  # which other runs may use
    try:
        if tokenizer.characters:
            learn_characters(documents(), tokenizer.file, may_replace)
        else:
            prefix = tokenizer.file.with_suffix("")
            train_sentencepiece(documents(), prefix, config.data.vocab_size, may_replace)
    except UserError:
        own_key = "data.tokenizer" if tokenizer.characters else "data.vocab_size"
        keys = [] if unreadable else [own_key]
        source_at_fault = unreadable[0] if unreadable else next(iter(texts))
        with naming_settings(config, source_at_fault, *keys):
            raise


def _build_data_set(
    config: RunConfig, source: DataSource, text: TextSource, tokenizer_file: Path
) -> None:
    """Tokenize a text, with progress on a terminal."""
    if text.options.chats:
        for note in text.options.chats.notes:
            say(f"note       {source.key}: {note}", sys.stderr)
    left_out = left_out_words(text.left_out)
    with build_progress(text.name, text.total_chars(), left_out) as report:
        result = prepare(
            text,
            source.prefix,
            tokenizer=tokenizer_file,
            workers=config.data.workers or cores(),
            overwrite=not config.data.cache,  # other runs may use what is in data.cache
            on_progress=report,
        )
    if result.skipped and text.name != STANDARD_LIBRARY:
        say(f"{source.key}: {skipped_words(result)}", sys.stderr)


def _require_unchanged_texts(
    missing: Sequence[DataSource], texts: Mapping[DataSource, TextSource], checkpoint: Store
) -> None:
    """Raise UserError for texts that are not those that the checkpoint was trained on."""
    problems = [*_changed_texts(missing, texts, checkpoint)]
    if problems:
        raise UserError(*problems)


def _changed_texts(
    missing: Sequence[DataSource], texts: Mapping[DataSource, TextSource], checkpoint: Store
) -> Iterator[Problem]:
    """Yield a problem for each text that is not one that the checkpoint was trained on.

    missing: sources whose data sets are not built. A text is left to the later comparison of tokens
    if the checkpoint has no digests of texts and no earlier data set is in its place.
    """
    identity = read_identity(checkpoint)
    saved_sets = identity.sets if identity else []
    has_digests = any(_has_digest(saved) for saved in saved_sets)
    for source in missing:
        if any(_is_text(saved.text, texts[source]) for saved in saved_sets):
            continue
        if not source.index_file.exists() and not has_digests:
            continue  # it is built, and its tokens are compared with those of the checkpoint
        yield Problem.of(
            "training.other_text",
            key=source.key,
            names=_describe_names(source.name, [saved.source for saved in saved_sets]),
            path=checkpoint.path,
            reason="its documents are others" if has_digests else _reason_without_digest(source),
            hint=_hint_at_existing_tokens(source),
        )


def _has_digest(saved_set: DataSet) -> bool:
    return saved_set.text is not None and "sha256" in saved_set.text


def _describe_names(name: str, saved_names: Sequence[str]) -> str:
    """Return the name of a text, after those of the checkpoint's if it is not one of them."""
    if name in saved_names:
        return toml(name)
    return f"{', '.join(map(toml, saved_names))} -> {toml(name)}"


def _is_text(saved_text: dict[str, Any] | None, text: TextSource) -> bool:
    """Return True if a text is the one that a checkpoint was trained on, by names, sizes and times,
    or by content.

    saved_text: the identity of the checkpoint's text.
    """
    if saved_text is None:
        return False
    by_name = {key: value for key, value in saved_text.items() if key not in ("sha256", "chars")}
    if by_name == text.identity():
        return True
    digest = saved_text.get("sha256")
    chars = saved_text.get("chars")
    if not isinstance(digest, str) or not isinstance(chars, int):
        return False
    return has_digest(text, digest, chars)


def _reason_without_digest(source: DataSource) -> str:
    """Return why a text is taken for another one where no digest of it is known."""
    return (
        "its files have another name, size or time, or are read otherwise (text_field, "
        "chat_template, max_chars, encoding, skip_bad), or an earlier version tokenized it and "
        "noted no digest; if the text is the same, remove "
        f"{source.index_file} and the same "
        "command makes its tokens anew and compares them"
    )


def _hint_at_existing_tokens(source: DataSource) -> str:
    if source.index_file.exists():
        return f"; {source.key}={source.prefix} goes on with the tokens that are there"
    return ""


def _cache_problems(
    config: RunConfig, missing: Sequence[DataSource], tokenizer: _TextTokenizer
) -> Iterator[Problem]:
    """Yield problems if data.cache, which other runs may use, holds data sets of other texts or
    tokenizers.
    """
    if not config.data.cache:
        return
    files = [source.index_file for source in missing]
    if tokenizer.saved and not tokenizer.exists:
        files.append(tokenizer.file)
    for file in files:
        if file.exists():
            yield Problem.of("training.cache_of_others", file=file)
