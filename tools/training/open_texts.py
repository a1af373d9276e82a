"""The texts of a run, opened to be read."""

from pathlib import Path

from megaprec.errors import UserError
from megaprec.text.chats import load_chats
from megaprec.text.readers import TextOptions
from megaprec.text.sources import TextSource, open_source
from tools.config.tables.data_settings import Data
from tools.training.data_sources import DataSource


def open_text(source: DataSource, data: Data, tokenizer_file: Path | None) -> TextSource:
    """Open a source that is text: see `DataSource.open_text`."""
    if source.name.endswith((".bin", ".idx")):
        raise UserError.of("training.data_set_prefix", source=source.name[:-4])
    # Only training data is cut.
    max_chars = None if source.validation_name else data.max_chars or None
    options = TextOptions(
        field=data.text_field,
        encoding=data.encoding,
        exclude=data.exclude,
        skip_bad=data.skip_bad,
        max_chars=max_chars,
        chats=load_chats(data.chat_template, tokenizer_file) if data.chat_template else None,
    )
    return open_source(source.names, options)
