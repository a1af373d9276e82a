"""The form of a file of text, by its ending, and what a file is by its first bytes."""

import codecs
from pathlib import Path

from megaprec.errors import UserError
from megaprec.text.packed_files import PACKED, naming_damage, open_unpacked

JSONL = ".jsonl"
ALSO_JSONL = (".ndjson", ".jsonlines")  # other names of the same form
JSON = ".json"
PARQUET = ".parquet"
UTF8 = "utf-8"
WIDE_CODECS = ("utf-16", "utf-32")  # in which two or four letters are one character
SAMPLED_BYTES = 1 << 20  # that are looked at for UTF-8
BY_CHANCE = 8  # characters beyond ASCII: as many are not UTF-8 by chance
# Endings of forms that are not read, and would be one plain text in silence: what the file is, and
# what to do.
NOT_READ = {
    **dict.fromkeys((".zip", ".7z", ".rar"), "an archive: unpack it and give the folder"),
    ".tgz": "an archive: name it .tar.gz if it has WebDataset's members, or unpack it",
    **dict.fromkeys(
        (".bz2", ".xz", ".lzma", ".lz4", ".br", ".z", ".tbz2", ".txz"),
        "packed in a form that is not read: unpack it, or pack it by gzip or zstd",
    ),
    **dict.fromkeys(
        (".feather", ".ipc"), "an Arrow table: name it .arrow, or write it as .parquet or .jsonl"
    ),
}
# First bytes of files that are taken for text by mistake; where they are letters, as many as no
# text begins with.
MAGIC = {
    b"\x1f\x8b": "it is packed by gzip: its name must end in .gz",
    b"\x28\xb5\x2f\xfd": "it is packed by zstd: its name must end in .zst",
    b"BZh91AY&SY": "it is packed by bzip2: unpack it",
    b"\xfd7zXZ\0": "it is packed by xz: unpack it",
    b"\x04\x22M\x18": "it is packed by lz4: unpack it",
    b"PAR1\x15": "it is Parquet: its name must end in .parquet",
    b"ARROW1\0\0": "it is an Arrow table: its name must end in .arrow",
    b"version https://git-lfs.github.com/": (
        "it is a pointer of Git LFS, not the file itself: run git lfs pull in its folder"
    ),
    b"{\\rtf1": "it is RTF: extract its text first",
    b"%PDF-": "it is a PDF: extract its text first",
    b"PK\x03\x04": "it is a zip archive or an office document: extract its text first",
}
UTF16_MAGIC = {
    codecs.BOM_UTF16_LE: "it is UTF-16 or UTF-32: convert it to UTF-8",
    codecs.BOM_UTF16_BE: "it is UTF-16: convert it to UTF-8",
}
ZERO = "it is UTF-16 or binary; convert it to UTF-8 or leave it out"


def form(file: Path) -> str:
    """Return the suffix that tells the form of a file, in small letters and without that of the
    compression."""
    suffix = file.suffix.lower()
    if suffix in PACKED:
        suffix = Path(file.stem).suffix.lower()
    return JSONL if suffix in ALSO_JSONL else suffix


def require_read(file: Path) -> None:
    """Raise UserError for a file whose ending says that it has a form that is not read."""
    description = NOT_READ.get(form(file))
    if description:
        raise UserError.of("data.source_not_text", file=file, description=description)


def other_form(file: Path, encoding: str = UTF8) -> str:
    """Return what a file is, by its first bytes, and what to do; "" if they may be text."""
    with naming_damage(file, lambda: "1"), open_unpacked(file) as stream:
        beginning = stream.read(max(map(len, MAGIC)))
    description = by_first_bytes(beginning)
    # other encodings may begin with the mark of UTF-16, or be it
    is_utf8 = codecs.lookup(encoding).name == UTF8
    return "" if description in UTF16_MAGIC.values() and not is_utf8 else description


def by_first_bytes(content: bytes) -> str:
    """Return what a file is that begins with these bytes, and what to do; "" if it may be text."""
    for magic, description in {**MAGIC, **UTF16_MAGIC}.items():
        if content.startswith(magic):
            return description
    return ""


def is_utf8_instead(file: Path, encoding: str) -> bool:
    """Return True if the beginning of a file is UTF-8, and would be other characters in `encoding`
    without an error.

    Text of another encoding is hardly ever UTF-8 by chance, but for a few characters.
    """
    codec = codecs.lookup(encoding).name
    if codec.startswith(UTF8):
        return False
    with naming_damage(file, lambda: "1"), open_unpacked(file) as stream:
        beginning = stream.read(SAMPLED_BYTES)
    try:
        # the last character may be cut
        text = codecs.getincrementaldecoder(UTF8)().decode(beginning)
    except UnicodeDecodeError:
        return False
    if codec.startswith(WIDE_CODECS):
        return bool(text) and "\0" not in text
    return sum(not character.isascii() for character in text) >= BY_CHANCE
