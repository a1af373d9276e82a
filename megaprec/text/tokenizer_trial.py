"""A separate program that reads the file of a tokenizer and encodes a text, with limits of memory
and time.

    python -P tokenizer_trial.py PATH

The libraries of tokenizers trust their files: odd ones make them panic, abort the process, or take
gigabytes and minutes. This process ends with 0 if the file does none of that; a file that a library
refuses with an error is as harmless as one that it reads. It ends with PANIC for a panic, and
otherwise by the signal of a limit.

This module imports no other module of the project, so that it starts fast; it loads `limits.py` by
its path.
"""

import json
import os
import runpy
import sys
from pathlib import Path

limit_process = runpy.run_path(str(Path(__file__).with_name("limits.py")))["limit_process"]
PANIC = 77  # exit code
# bytes of memory beyond what the process itself takes, and for each byte of the file PER_BYTE more
MEMORY = 2 << 30
PER_BYTE = 60
# of processor time, and a second more for each SECOND_FOR bytes of the file
SECONDS = 10
SECOND_FOR = 1 << 20
TEXT = (
    'The model says: it\'s 12345, x = [1.5e-3]\r\n\t  # naïve é ﬁ 数字 😀\u2581\x07 {"a": 1} '
    + "a" * 2000
)


def try_tokenizer(content: bytes) -> None:
    """Read a tokenizer and encode a text with it. Raises what the libraries raise."""
    if content[:64].lstrip().startswith(b"{"):
        import tokenizers  # noqa: PLC0415 (optional)

        json.loads(content)
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.get_vocab(with_added_tokens=True)
        tokenizer.encode_special_tokens = True
        tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False).ids)
    else:
        import sentencepiece  # noqa: PLC0415 (one of two)

        model = sentencepiece.SentencePieceProcessor()
        model.LoadFromSerializedProto(content)
        model.decode(model.encode(TEXT))


def main(path: str) -> None:
    """Try the tokenizer in the file `path`; end with 0 or PANIC."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    content = Path(path).read_bytes()
    size = len(content)
    limit_process(MEMORY + PER_BYTE * size, SECONDS + size // SECOND_FOR)
    code = 0
    try:
        try_tokenizer(content)
    except Exception:  # the caller meets it too, and tells it
        code = 0
    except BaseException:  # a panic of Rust
        code = PANIC
    sys.stdout.flush()
    os._exit(code)  # nothing that a library runs at its end


if __name__ == "__main__":
    main(sys.argv[1])
