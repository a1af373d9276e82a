"""Training of a tokenizer on text, in seconds.

SentencePiece: byte-pair encoding with byte fallback, trained on a bounded sample of lines, without
normalization. Runs of spaces become pieces, so indentation is cheap; a newline is never in a
training line, so it is one token, the byte piece <0x0A>. Hugging Face's `tokenizers`: byte-level
byte-pair encoding. Both give every text back exactly.
"""

import io
import random
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece

from megaprec.data.files import beside, write_whole
from megaprec.data.tokenizer_files import protobuf_fields
from megaprec.data.tried_tokenizers import remember
from megaprec.durable import read_whole
from megaprec.errors import UserError

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
# fields of a model, and of both
NORMALIZER = 3
DENORMALIZER = 5
TABLE = 2
MOST_PIECES = 10_000_000  # of a vocabulary: trainers reserve memory for all of them


class ImpossibleVocabulary(UserError):
    """A text does not allow a size of vocabulary. nearest: the nearest size that it allows."""

    def __init__(self, problem: str, nearest: int) -> None:
        super().__init__(problem)
        self.nearest = nearest


def train_sentencepiece(
    texts: Iterable[str], prefix: Path, vocab_size: int, overwrite: bool = False
) -> Path:
    """Learn `vocab_size` pieces from `texts`, write `PREFIX.model` atomically, and return its path.

    The bytes of the model depend only on the texts and the size. Reads all texts once, with about
    `SAMPLE_CHARS` characters in memory. Raises UserError if the text does not allow this size, or
    if another model is there and may not be overwritten.
    """
    _require_possible(vocab_size)
    lines = sample_lines(texts)
    if not lines:
        raise UserError(
            "a tokenizer cannot be learned from a text without a line; give a text of some length"
        )
    content = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=map(_escaped, lines),
            model_writer=content,  # a file name would be recorded in the model and change its bytes
            vocab_size=max(
                vocab_size, FIXED_PIECES
            ),  # so that 0 gives the error of any size too small
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
        reason, nearest = _why_untrainable(str(problem))
        what = f"a vocabulary of {vocab_size} cannot be learned from this text: {reason}"
        raise (ImpossibleVocabulary(what, nearest) if nearest else UserError(what)) from problem
    return _publish(beside(prefix, ".model"), content.getvalue() + _lossless(), overwrite)


def _escaped(line: str) -> str:
    """Return a line as the model has it: rewritten by the rules of `escapes`, one character at a
    time."""
    if SPACE in line or DLE in line:
        return "".join(ESCAPES.get(character, character) for character in line)
    return line


@cache
def escapes() -> tuple[bytes, bytes]:
    """Return the tables by which SentencePiece rewrites characters before it splits texts, and
    back.

    It states a table only within a model, so a tiny one is trained.
    """
    with TemporaryDirectory(prefix="megaprec_escapes_") as folder:
        there = Path(folder, "there.tsv")
        back = Path(folder, "back.tsv")
        rules = {_numbers(character): _numbers(escape) for character, escape in ESCAPES.items()}
        there.write_text("".join(f"{one}\t{other}\n" for one, other in rules.items()))
        back.write_text("".join(f"{other}\t{one}\n" for one, other in rules.items()))
        tiny = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["ab"]),
            model_writer=tiny,
            vocab_size=5,
            model_type="char",
            normalization_rule_tsv=str(there),
            denormalization_rule_tsv=str(back),
            hard_vocab_limit=False,
            num_threads=1,
            minloglevel=2,
        )
    parts = dict(protobuf_fields(tiny.getvalue()))
    there_table, back_table = (
        dict(protobuf_fields(parts[part]))[TABLE] for part in (NORMALIZER, DENORMALIZER)
    )
    return there_table, back_table


def _numbers(characters: str) -> str:
    """Return the code points of characters as SentencePiece's rules have them."""
    return " ".join(f"{ord(character):X}" for character in characters)


def _lossless() -> bytes:
    """Return what is appended to a model so that SentencePiece rewrites texts by `escapes`, and
    back.

    Parts of a message that come later count, so nothing before them has to be changed.
    """
    there, back = escapes()
    kept = {3: 0, 4: 0}  # no space is put before a text, and none is taken away
    escaping = _message({1: b"escaped", TABLE: there, **kept, 5: 1})  # 5: a space becomes U+2581
    returning = _message({1: b"escaped", TABLE: back, **kept, 5: 0})
    return _message({NORMALIZER: escaping, DENORMALIZER: returning})


def _message(fields: Mapping[int, bytes | int]) -> bytes:
    """Return a message of protobuf with these fields."""
    made = b""
    for number, value in fields.items():
        if isinstance(value, int):
            made += _number(number << 3) + _number(value)
        else:
            made += _number(number << 3 | 2) + _number(len(value)) + value
    return made


def _number(value: int) -> bytes:
    made = b""
    while value > 0x7F:
        made += bytes([value & 0x7F | 0x80])
        value >>= 7
    return made + bytes([value])


def _require_possible(vocab_size: int) -> None:
    """Raise UserError for a vocabulary that no trainer has room for."""
    if vocab_size > MOST_PIECES:
        raise UserError(
            f"a vocabulary of {vocab_size} cannot be learned: give at most {MOST_PIECES}"
        )


def train_hugging_face(
    texts: Iterable[str], path: Path, vocab_size: int, overwrite: bool = False
) -> Path:
    """Learn `vocab_size` tokens from `texts`, write a `tokenizer.json` atomically to `path`, and
    return the path.

    Byte-level byte-pair encoding like GPT-2's; the end of a document is <|endoftext|>, token 0. The file depends only
    on the texts and the size. Raises UserError as `train_sentencepiece` does, and without the
    package `tokenizers`.
    """
    try:
        import tokenizers  # noqa: PLC0415 (optional)
    except ImportError as problem:
        raise UserError(f"{path} needs tokenizers: pip install tokenizers") from problem
    _require_possible(vocab_size)
    lines = sample_lines(texts)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    if not lines or vocab_size <= len(alphabet):
        least = (
            f"the bytes and the end of a document alone take {len(alphabet) + 1}; give at least "
            "that"
        )
        why = least if lines else "it has no line"
        raise UserError(f"a vocabulary of {vocab_size} cannot be learned from this text: {why}")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    made.train_from_iterator((line + "\n" for line in lines), trainer)
    if (there := made.get_vocab_size()) < vocab_size:
        raise UserError(
            f"a vocabulary of {vocab_size} cannot be learned from this text: there are only "
            f"{there} pieces in it; give at most that, or more text"
        )
    return _publish(path, made.to_str(pretty=True).encode(), overwrite)


def _publish(path: Path, content: bytes, overwrite: bool) -> Path:
    if path.exists() and read_whole(path) != content and not overwrite:
        raise UserError(f"{path} exists and is another model; choose another name or remove it")
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
    dice = random.Random(0)
    kept: list[str] = []
    chars = 0
    probability = 1.0
    for line in (line for text in texts for line in text.split("\n")):
        if line and dice.random() < probability:
            kept.append(line)
            chars += len(line)
        while chars > limit:
            kept = [line for line in kept if dice.random() < 0.5]
            chars = sum(map(len, kept))
            probability = probability / 2
    return kept


def _why_untrainable(problem: str) -> tuple[str, int]:
    """Return SentencePiece's error in the user's terms, and the nearest possible size, 0 if there
    is none.

    The original error names options that users cannot set here.
    """
    if found := re.search(r"required_chars\. \d+ vs (\d+)", problem):
        return (
            f"the bytes and the common characters alone take {found[1]}; give at least that",
            int(found[1]),
        )
    if found := re.search(r"value <= (\d+)", problem):
        return f"there are only {found[1]} pieces in it; give at most that, or more text", int(
            found[1]
        )
    return " ".join(problem.split()), 0
