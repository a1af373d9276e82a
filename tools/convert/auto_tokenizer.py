"""The check that transformers' AutoTokenizer splits texts as the tokenizer.json of an exported
folder says.

AutoTokenizer goes by `tokenizer_class` of tokenizer_config.json and by `model_type` of config.json.
Many of its classes put their own pre-tokenizer in place of that of the file, and which ones do
differs between versions.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaprec.durable import put_text
from megaprec.scratch import scratch_folder
from megaprec.text.characters import CharacterTokenizer
from megaprec.text.tokenizer import Tokenizer, load_tokenizer
from tools.convert.hf.vocabulary import PROBE, main_file, write_tokenizer
from tools.convert.transformers_package import quiet_transformers, why_missing

# Numbers, spaces, letters of both cases, signs and lines, which pre-tokenizers treat in different
# ways.
TEXTS = (
    "In 1984 there were 1234567 of 12,345.678 or 0x7fff, 3.14159 and 007.",
    "  two spaces   three\ttab\n\n\nlines \r\n end  ",
    "Don't we'll I'VE CamelCase snake_case ALLCAPS http://example.org/a?b=c&d#e",
    "Überraschung naïve Ελληνικά русский 中文字符 日本語 한국어 العربية हिन्दी",
    "if (x <= 10) { return y[3] != z; } // comment -- *** ===",
    "x" * 40 + " " * 20 + "9" * 20 + "!" * 12,
    PROBE,
)


def auto_tokenizer_line(
    files: Sequence[Path], config: Mapping[str, Any], begin: int | None, name: str
) -> str:
    """Return a line on AutoTokenizer in a folder with this config.json and these files of a
    tokenizer; "" for none.

    begin: id of the token that begins a document.
    name: of the folder, as the line names it.
    """
    if main_file(files) is None:
        return ""
    with scratch_folder("tokenizer") as temporary:
        folder = Path(temporary)
        put_text(folder / "config.json", json.dumps(config))
        write_tokenizer(files, folder, begin)
        written = load_tokenizer(folder / "tokenizer.json")
        try:
            with quiet_transformers() as transformers:
                problem = next(_differences(transformers, folder, written), "")
                version = transformers.__version__
        except ImportError as missing:
            return (
                f"{name}: its tokenizer was not compared with transformers, which "
                f"{why_missing(missing)}"
            )
    if not problem:
        count = len(_texts_for(written))
        return f"{name}: AutoTokenizer splits {count} texts as its tokenizer.json says"
    return (
        f"warning: {name}: AutoTokenizer of transformers {version} "
        f"{problem.replace(f'{folder}', name)}; load the "
        f"tokenizer by PreTrainedTokenizerFast.from_pretrained({name!r}), which goes by "
        "tokenizer.json alone"
    )


def initial_tokenizer_line(folder: Path, tokenizer_file: Path) -> str:
    """Return a warning if AutoTokenizer splits texts otherwise than a file of the folder of first
    weights; "" if it does not, or without transformers."""
    tokenizer = load_tokenizer(tokenizer_file)
    try:
        with quiet_transformers() as transformers:
            problem = next(_differences(transformers, folder, tokenizer), "")
            version = transformers.__version__
    except ImportError:
        return ""
    if not problem:
        return ""
    return (
        f"warning: {folder}: AutoTokenizer of transformers {version} {problem}; this run goes by "
        f"{tokenizer_file.name}: if the weights were trained with the other, set data.tokenizer to "
        "the tokenizer.json that AutoTokenizer.from_pretrained(FOLDER).save_pretrained(DIR) writes "
        "into DIR"
    )


def _differences(transformers: Any, folder: Path, written: Tokenizer) -> Iterator[str]:
    """Yield what AutoTokenizer does otherwise than the tokenizer.json that was `written`."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError:
        raise
    except Exception as error:  # whatever a library makes of a file
        yield f"cannot load it ({_in_a_line(error)})"
        return
    for text in _texts_for(written):
        ours = written.encode(text)
        try:
            theirs = tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            yield f"cannot split {text[:40]!r} ({_in_a_line(error)})"
            return
        if theirs != ours:
            position = _first_difference(ours, theirs)
            excerpt = written.decode(ours[position : position + 4])
            yield (
                f"splits texts otherwise than tokenizer.json says, from {excerpt!r} on in "
                f"{text[:40]!r}"
            )
            return
    if written.eos is not None and tokenizer.eos_token_id != written.eos:
        yield f"ends documents by token {tokenizer.eos_token_id}, and not by {written.eos}"


def _texts_for(tokenizer: Tokenizer) -> Sequence[str]:
    """Return the texts to compare by: of a tokenizer of characters, which refuses all others, its
    own."""
    if not isinstance(tokenizer, CharacterTokenizer):
        return TEXTS
    characters = "".join(tokenizer.vocabulary())
    return (characters, characters[::-1], "".join(character * 3 for character in characters))


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return where two lists of ids differ first; 0 if one is the beginning of the other."""
    for position, (our_id, their_id) in enumerate(zip(ours, theirs, strict=False)):
        if our_id != their_id:
            return position
    return 0
