"""Training of a tokenizer on text, in seconds.

SentencePiece: byte-pair encoding with byte fallback, trained on a bounded sample of lines, without
normalization. Runs of spaces become pieces, so indentation is cheap; a newline is never in a
training line, so it is one token, the byte piece <0x0A>. Hugging Face's `tokenizers`: byte-level
byte-pair encoding. Both give every text back exactly.
"""

import io
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import sentencepiece

from megaprec.durable import put_text, read_whole
from megaprec.errors import Problem, UserError
from megaprec.resources import is_for_want_of_resources
from megaprec.scratch import scratch_folder
from megaprec.text.characters import character_file, distinct_characters
from megaprec.text.tokenizer_files import protobuf_fields
from megaprec.text.tried_tokenizers import remember
from megaprec.tokens.files import with_suffix, write_whole

# of text to learn a vocabulary from; ten times more changes tokens per text by some 1 %
SAMPLE_CHARS = 4_000_000
FIXED_PIECES = 3 + 256  # unknown, begin, end; bytes
LONGEST_LINE = 1 << 16  # bytes; SentencePiece ignores longer lines
END = "<|endoftext|>"
# SentencePiece writes a space as U+2581 and reads this sign back as a space. So a text's own U+2581
# is escaped, and so is the character that escapes it: nothing is lost, and all other texts have the
# same pieces.
SPACE = "\u2581"
DLE = "\x10"  # data link escape, a control character that texts do not have
ESCAPES = {SPACE: f"{DLE}_", DLE: f"{DLE}."}
# numbers of fields of a SentencePiece model
NORMALIZER = 3
DENORMALIZER = 5
# numbers of fields of a normalizer
NAME = 1
TABLE = 2
ADD_DUMMY_PREFIX = 3
REMOVE_EXTRA_WHITESPACES = 4
ESCAPE_WHITESPACES = 5
MAX_PIECES = 10_000_000  # of a vocabulary: trainers reserve memory for all of them


class ImpossibleVocabulary(UserError):
    """A text does not allow a size of vocabulary. nearest: the nearest size that it allows."""

    def __init__(self, problem: Problem, nearest: int) -> None:
        super().__init__(problem)
        self.nearest = nearest


def train_sentencepiece(
    texts: Iterable[str],
    prefix: Path,
    vocab_size: int,
    overwrite: bool = False,
) -> Path:
    """Learn `vocab_size` pieces from `texts`, write `PREFIX.model` atomically, and return its path.

    The bytes of the model depend only on the texts and the size. Reads all texts once, with about
    `SAMPLE_CHARS` characters in memory. Raises UserError if the text does not allow this size, or
    if another model is there and may not be overwritten.
    """
    _require_possible(vocab_size)
    lines = sample_lines(texts)
    if not lines:
        raise UserError.of("data.nothing_to_learn_from")
    escaped = [_escape(line) for line in lines]
    if all(len(line.encode()) > LONGEST_LINE for line in escaped):
        raise UserError.of("data.lines_too_long", longest=LONGEST_LINE)
    content = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(escaped),
            model_writer=content,  # a file name would be recorded in the model and change its bytes
            # at least so many, so that 0 gives the error of any size too small
            vocab_size=max(vocab_size, FIXED_PIECES),
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=LONGEST_LINE,
            num_threads=1,  # recorded in the model too
            minloglevel=2,
        )
    except RuntimeError as problem:
        if is_for_want_of_resources(problem):
            raise MemoryError(f"a tokenizer cannot be learned: {problem}") from problem
        reason, nearest = _why_untrainable(str(problem))
        refusal = Problem.of("data.vocabulary_not_learnable", vocab_size=vocab_size, problem=reason)
        if nearest is None:
            raise UserError(refusal) from problem
        raise ImpossibleVocabulary(refusal, nearest) from problem
    return _publish(with_suffix(prefix, ".model"), content.getvalue() + _lossless(), overwrite)


def learn_characters(texts: Iterable[str], path: Path, overwrite: bool = False) -> Path:
    """Write the tokenizer of the characters of `texts` atomically to `path`, and return the path.

    Reads all texts once. Raises UserError if they have none, or if another tokenizer is there and
    may not be overwritten.
    """
    characters = distinct_characters(texts)
    if not characters:
        raise UserError.of("data.nothing_to_learn_from")
    return _publish(path, character_file(characters), overwrite)


def _escape(line: str) -> str:
    """Return a line as the model has it: rewritten by the rules of `escapes`, one character at a
    time."""
    if SPACE in line or DLE in line:
        return "".join(ESCAPES.get(character, character) for character in line)
    return line


@cache
def escapes() -> tuple[bytes, bytes]:
    """Return the tables by which SentencePiece rewrites characters before it splits texts, and back
    afterwards.

    It states a table only within a model, so a tiny one is trained.
    """
    with scratch_folder("escapes") as folder:
        escape_file = Path(folder, "there.tsv")
        unescape_file = Path(folder, "back.tsv")
        rules = {_code_points(character): _code_points(text) for character, text in ESCAPES.items()}
        put_text(escape_file, "".join(f"{plain}\t{text}\n" for plain, text in rules.items()))
        put_text(unescape_file, "".join(f"{text}\t{plain}\n" for plain, text in rules.items()))
        tiny = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["ab"]),
            model_writer=tiny,
            vocab_size=5,
            model_type="char",
            normalization_rule_tsv=str(escape_file),
            denormalization_rule_tsv=str(unescape_file),
            hard_vocab_limit=False,
            num_threads=1,
            minloglevel=2,
        )
    parts = dict(protobuf_fields(tiny.getvalue()))
    escape_table = dict(protobuf_fields(parts[NORMALIZER]))[TABLE]
    unescape_table = dict(protobuf_fields(parts[DENORMALIZER]))[TABLE]
    return escape_table, unescape_table


def _code_points(characters: str) -> str:
    """Return the code points of characters as SentencePiece's rules have them."""
    return " ".join(f"{ord(character):X}" for character in characters)


def _lossless() -> bytes:
    """Return what is appended to a model so that SentencePiece rewrites texts by `escapes`, and
    back.

    Parts of a message that come later count, so nothing before them has to be changed.
    """
    escape_table, unescape_table = escapes()
    # no space is put before a text, and none is taken away
    unchanged = {ADD_DUMMY_PREFIX: 0, REMOVE_EXTRA_WHITESPACES: 0}
    escaping = _message({NAME: b"escaped", TABLE: escape_table, **unchanged, ESCAPE_WHITESPACES: 1})
    unescaping = _message(
        {NAME: b"escaped", TABLE: unescape_table, **unchanged, ESCAPE_WHITESPACES: 0}
    )
    return _message({NORMALIZER: escaping, DENORMALIZER: unescaping})


def _message(fields: Mapping[int, bytes | int]) -> bytes:
    """Return a message of protobuf with these fields."""
    message = b""
    for number, value in fields.items():
        # the lowest bits of a key say if a number follows, or a length and as many bytes
        if isinstance(value, int):
            message += _varint(number << 3) + _varint(value)
        else:
            message += _varint(number << 3 | 2) + _varint(len(value)) + value
    return message


def _varint(value: int) -> bytes:
    """Return a number as protobuf has it: 7 bits a byte, the lowest first."""
    encoded = b""
    while value > 0x7F:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def _require_possible(vocab_size: int) -> None:
    """Raise UserError for a vocabulary that no trainer has room for."""
    if vocab_size > MAX_PIECES:
        raise UserError.of(
            "data.vocabulary_too_large", vocab_size=vocab_size, max_pieces=MAX_PIECES
        )


def train_hugging_face(
    texts: Iterable[str],
    path: Path,
    vocab_size: int,
    overwrite: bool = False,
    special: Sequence[str] = (),
) -> Path:
    """Learn `vocab_size` tokens from `texts`, write a `tokenizer.json` atomically to `path`, and
    return the path.

    special: further special tokens, such as those of a chat template: tokens 1, 2, ...

    Byte-level byte-pair encoding like GPT-2's; the end of a document is <|endoftext|>, token 0. The
    file depends only on the texts and the size. Raises UserError if the text does not allow this
    size, if another file is there and may not be overwritten, and without the package `tokenizers`.
    """
    try:
        import tokenizers  # noqa: PLC0415 (optional)
    except ImportError as problem:
        raise UserError.of("data.tokenizers_missing", path=path) from problem
    _require_possible(vocab_size)
    lines = sample_lines(texts)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special_tokens = [*dict.fromkeys((END, *special))]
    problem = ""
    if not lines:
        problem = "it has no line"
    elif vocab_size < len(alphabet) + len(special_tokens):
        problem = (
            "the bytes, the end of a document and other special tokens alone take "
            f"{len(alphabet) + len(special_tokens)}; give at least that"
        )
    if problem:
        raise UserError.of("data.vocabulary_not_learnable", vocab_size=vocab_size, problem=problem)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator((line + "\n" for line in lines), trainer)
    piece_count = tokenizer.get_vocab_size()
    if piece_count < vocab_size:
        raise UserError.of(
            "data.vocabulary_beyond_text", vocab_size=vocab_size, piece_count=piece_count
        )
    return _publish(path, tokenizer.to_str(pretty=True).encode(), overwrite)


def _publish(
    path: Path,
    content: bytes,
    overwrite: bool,
) -> Path:
    """Write a tokenizer to `path` and return this. Its digest is kept on this machine as one that
    can be read without a trial. Raises UserError if another one is there, unless `overwrite`."""
    if path.exists() and read_whole(path) != content and not overwrite:
        raise UserError.of("data.model_exists", path=path)
    write_whole(path, content)
    remember(content)
    return path


def sample_lines(texts: Iterable[str], limit: int = SAMPLE_CHARS) -> list[str]:
    """Return a sample of the lines of `texts`, at most `limit` characters, spread evenly over all
    of them.

    Whenever the sample exceeds the limit, each of its lines is dropped with probability one half,
    and the probability of taking later lines is halved. The random numbers are seeded, so the
    sample depends only on the texts.
    """
    generator = random.Random(0)
    sample: list[str] = []
    chars = 0  # of the sample
    probability = 1.0  # of taking a line
    for text in texts:
        for line in text.split("\n"):
            if line and generator.random() < probability:
                sample.append(line)
                chars += len(line)
            while chars > limit:
                sample = [line for line in sample if generator.random() < 0.5]
                chars = sum(map(len, sample))
                probability /= 2
    return sample


def _why_untrainable(problem: str) -> tuple[str, int | None]:
    """Return SentencePiece's error in the user's terms, and the nearest possible size, if any.

    The original error names options that users cannot set here.
    """
    too_small = re.search(r"required_chars\. \d+ vs (\d+)", problem)
    if too_small:
        count = too_small[1]
        reason = f"the bytes and the common characters alone take {count}; give at least that"
        return reason, int(count)
    too_large = re.search(r"value <= (\d+)", problem)
    if too_large:
        count = too_large[1]
        return f"there are only {count} pieces in it; give at most that, or more text", int(count)
    return " ".join(problem.split()), None
