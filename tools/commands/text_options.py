"""Arguments of the commands that read texts."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megaprec.errors import UserError
from megaprec.text.chats import load_chats
from megaprec.text.forms import UTF8
from megaprec.text.readers import TextOptions
from megaprec.text.tokenizer_files import tokenizer_in


def add_text_options(parser: ArgumentParser) -> None:
    """Add how the files of a text are read."""
    parser.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="field of a JSON object, or column of a table, that holds the text (default: text)",
    )
    parser.add_argument(
        "--encoding",
        default=UTF8,
        metavar="NAME",
        help="encoding of plain text, .csv, .tsv, and pages that do not name their own (default: "
        "utf-8)",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out files and folders of this name or path below the folder, such as "
        "'*.min.js' or 'build/*'; may be given several times",
    )


def tokenizer_path(path: str) -> Path:
    """Return the file of `--tokenizer`, which may be a folder with a tokenizer."""
    return tokenizer_in(Path(path))


def add_chat_template(parser: ArgumentParser) -> None:
    """Add by which template rows of conversations become text."""
    parser.add_argument(
        "--chat-template",
        default="",
        metavar="NAME",
        help="rows are conversations (messages, conversations, or prompt and completion), written "
        "by 'tokenizer' (the template of --tokenizer), 'chatml', the template in a file, or "
        "'plain': prompt and completion follow each other; with +last behind one of the first "
        "three only the answers after the last question of a conversation count",
    )


def add_skip_bad(parser: ArgumentParser) -> None:
    """Add how many bad files and rows are left out."""
    parser.add_argument(
        "--skip-bad",
        type=int,
        default=0,
        metavar="N",
        help="leave out at most N bad files and rows instead of ending at the first (default: 0)",
    )


def text_options(
    args: Namespace,
    *,
    max_chars: int | None = None,
    skip_bad: int = 0,
    chat_template: str = "",
) -> TextOptions:
    """Return how texts are read, as `add_text_options` has it. Raises UserError.

    max_chars, skip_bad, chat_template: of options that only some commands have; the last one needs
        `args.tokenizer`.
    """
    if skip_bad < 0:
        raise UserError.of("command.skip_bad", skip_bad=skip_bad)
    return TextOptions(
        field=args.text_field,
        encoding=args.encoding,
        exclude=tuple(args.exclude),
        skip_bad=skip_bad,
        max_chars=max_chars,
        chats=load_chats(chat_template, args.tokenizer) if chat_template else None,
    )
