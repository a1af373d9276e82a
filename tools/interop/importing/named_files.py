"""Files that a configuration or a script names, and that are beside it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaprec.parsing import parse_json, read_text

LARGEST_CONFIG = 256 * 1024  # bytes
LONGEST_NAME = 250  # letters of a file with its folders


def read_named_json(
    named: str, folder: Path, documents: Mapping[str, str] | None = None
) -> tuple[Mapping[str, Any], str]:
    """Return the JSON object that a text is or names, and "", or {} and what is wrong with it.

    folder: in which, or below which, the file may be. documents: files that a script writes.
    """
    is_inline = named.startswith("{")
    text = named if is_inline else (documents or {}).get(named) or text_beside(folder, named)
    if text is None:
        return {}, "this file is not beside: give it too, as another FILE.json"
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        return {}, f"is not JSON: {error}"
    if isinstance(content, dict):
        return content, ""
    return {}, "is not a JSON object"


def text_beside(folder: Path, named: str) -> str | None:
    """Return the text of a file in a folder or below it; None if it is not there.

    named: its path on the machine where it was used, of which only the name may be right here.
    """
    name = Path(named).name
    if len(named) > LONGEST_NAME or re.search(r"[\0*?\[]", named):
        return None
    for path in (folder / named, folder / name, *folder.glob(f"*/{name}")):
        if not path.resolve().is_relative_to(folder.resolve()):
            continue
        try:
            return read_text(path, LARGEST_CONFIG)
        except (OSError, ValueError):
            continue
    return None
