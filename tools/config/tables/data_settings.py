"""The table [data] of a run file: every key with its type, default, unit and help."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from megaprec.text.characters import CHARACTERS
from megaprec.text.forms import UTF8
from megaprec.text.tokenizer_files import tokenizer_in
from megaprec.tokens.files import with_suffix
from megaprec.tokens.places import is_url
from tools.config.tables.table import EXPANDED, MAX_SIZE, MAX_STEPS, FilePath, Table


def _as_tuple(value: object) -> object:
    """Return a list of TOML as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _tokenizer_in(path: str) -> str:
    """Return the file of the tokenizer in a folder, and any other path as it is."""
    return str(tokenizer_in(Path(path))) if path else path


LONGEST_NAME = 60  # of a set in metrics.jsonl
TokenizerPath = Annotated[FilePath, AfterValidator(_tokenizer_in)]
SourceName = Annotated[str, Field(min_length=1), EXPANDED]
TextSource = Annotated[
    SourceName | Annotated[tuple[SourceName, ...], Field(min_length=1)],
    BeforeValidator(_as_tuple),
]
"""A text or data set by its name, or several texts by theirs, which are read in this order."""


def names_of(source: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a source."""
    return (source,) if isinstance(source, str) else source


def _as_points(value: object) -> object:
    """Return a list of pairs of TOML as tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


# consumed samples, and the weight from there on
WeightPoint = tuple[
    Annotated[int, Field(ge=0, le=MAX_STEPS)],
    Annotated[float, Field(ge=0, allow_inf_nan=False)],
]
Weight = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False), Tag("number")]
    | Annotated[
        tuple[WeightPoint, ...],
        Field(min_length=1),
        BeforeValidator(_as_points),
        Tag("points"),
    ],
    # only what is wrong with the form that was meant is told
    Discriminator(lambda value: "points" if isinstance(value, list | tuple) else "number"),
]


class Blended(Table):
    """One text or data set of a blend."""

    source: TextSource = Field(description="Text or data set, as in data.source.")
    weight: Weight = Field(
        description="Share of the samples, relative to the sum of all weights; or pairs of a "
        "number of consumed samples, from 0 on, and the weight from there on, such as [[0, 0.7], "
        "[1000000, 0.3]].",
    )
    name: str = Field(
        default="",
        description="Name of its numbers in metrics.jsonl, as loss/NAME, tokens/NAME and "
        "share/NAME; empty: the last part of its source.",
    )

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """The weight as pairs; one that does not change has a single one."""
        return self.weight if isinstance(self.weight, tuple) else ((0, self.weight),)


def _name_of_source(source: str) -> str:
    """Return the last part of a path, pattern or URL, in characters that names may have; "set" if
    it is none, or dots alone."""
    path, _, _ = source.partition("?")
    _, _, last = path.rstrip("/").rpartition("/")
    # room for a number behind it
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", last)[-LONGEST_NAME + 5 :]
    return name if name.strip(".") else "set"


class Validated(Table):
    """One named set that the run evaluates."""

    name: str = Field(
        min_length=1,
        description="Name of the set in the log and in metrics.jsonl, as eval_loss/NAME.",
    )
    source: TextSource = Field(description="Text or data set, as in data.source.")


class Data(Table):
    """Training data: text or token files, tokenizer, held-out part."""

    # what is read
    source: TextSource = Field(
        default="python",
        description='Training data: "python" (the source of Python\'s standard library), a file, '
        'a folder, a pattern such as "texts/**/*.md", a list of these, which are read one after '
        "the other, or the common prefix of a .bin and .idx pair.",
    )
    blend: tuple[Blended, ...] = Field(
        default=(),
        strict=False,
        description="Several data sets in place of data.source, each with the weight of its share: "
        '[{source = "a.jsonl", weight = 0.7}, {source = "b/", weight = 0.3}]; empty: '
        "data.source alone. A weight that changes with the samples is a list of pairs: weight = "
        '[[0, 0.7], [1000000, 0.3]]; name = "web" names the numbers of a set in metrics.jsonl.',
    )
    blend_phases: Literal["steps", "linear"] = Field(
        default="steps",
        description="How weights of data.blend that have several points go from one to the next. "
        "steps: each holds up to the next; linear: the shares follow a line between two points, in "
        "a hundred steps.",
    )
    text_field: str = Field(
        default="text",
        min_length=1,
        description="Name of the field of a .jsonl line or of an object in a .json list, or the "
        "column of a .csv, .tsv or .parquet file, that holds the text.",
    )
    chat_template: FilePath = Field(
        default="",
        description="Rows of conversations (messages, conversations, or prompt and completion) "
        'become text by this template: "tokenizer": the one of data.tokenizer; "chatml"; the path '
        'of a Jinja file; "plain": prompt and completion follow each other; empty: rows are texts. '
        "With +last behind one of the first three only answers after the last question count.",
    )
    encoding: str = Field(
        default=UTF8,
        min_length=1,
        description="Encoding of plain text, .csv and .tsv files, and of .html pages that do not "
        "name their own.",
    )
    exclude: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Shell patterns of files and folders to leave out, by name or by path below "
        'the folder: ["*.min.js", "build/*"].',
    )
    skip_bad: int = Field(
        default=0,
        ge=0,
        le=MAX_SIZE,
        description="Number of bad files and rows of each text to leave out and list; one more "
        "refuses the text.",
    )

    # how it becomes tokens
    tokenizer: TokenizerPath = Field(
        default="",
        description="Path of a SentencePiece .model or a Hugging Face tokenizer.json, or of a "
        'folder with one; "characters": each character of the text is a token; empty: PREFIX.model '
        "beside a .bin and .idx pair if it exists; for text a tokenizer is trained.",
    )
    begin: Literal["auto", "none"] | Annotated[int, Field(ge=0, le=MAX_SIZE)] = Field(
        default="auto",
        description='Id of the token before each document in training: "auto": that of the weights '
        'of train.init_from, if they have one; "none": no token is put there. A data set whose '
        "documents have it already is taken as it is.",
    )
    vocab_size: int = Field(
        default=4096,
        gt=0,
        le=MAX_SIZE,
        description="Vocabulary size, in tokens, of the tokenizer that is trained.",
    )

    # how much of it, and by how many processes
    max_chars: int = Field(
        default=0, ge=0, description="Number of characters of the text to use; 0: all of it."
    )
    workers: int = Field(
        default=0, ge=0, description="Number of processes that tokenize text; 0: one per CPU core."
    )

    # what is evaluated
    held_out: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Fraction of the data kept out of training, for evaluation.",
    )
    held_out_from: Literal["auto", "everywhere", "end"] = Field(
        default="auto",
        description="Where the held-out part is taken from. everywhere: 64 pieces from all over "
        "the data, so that it is drawn like the training text; end: the last part, as Megatron-LM "
        "has it; auto: everywhere, but a run that goes on from a checkpoint keeps its part.",
    )
    validation: tuple[Validated, ...] = Field(
        default=(),
        strict=False,
        description='Further sets to evaluate, each with a loss of its own: [{name = "wiki", '
        'source = "wiki.txt"}, {name = "code", source = "code/"}]; empty: the held-out part alone.',
    )
    lm_eval: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description='Tasks of lm-evaluation-harness to evaluate: ["arc_easy", "my_task"]; empty: '
        "none.",
    )
    lm_eval_folder: FilePath = Field(
        default="",
        description="Folder of own tasks (.yaml) for data.lm_eval; empty: those of the harness "
        "alone.",
    )
    lm_eval_limit: int = Field(
        default=0,
        ge=0,
        le=MAX_SIZE,
        description="Number of documents of each task of data.lm_eval to use; 0: all.",
    )

    # how samples are made of documents
    shuffle: bool = Field(
        default=True, description="Shuffle the samples of each epoch; false: samples in file order."
    )
    windows: Literal["tiled", "random"] = Field(
        default="tiled",
        description="How samples are cut from the training text. tiled: one behind the other, each "
        "once an epoch; random: train.seq_length + 1 tokens from any token on, each drawn with "
        "replacement, as nanoGPT draws its batches.",
    )
    pack: Literal["none", "best_fit"] = Field(
        default="none",
        description="How documents are put into samples. none: samples are cut from the stream of "
        "all documents; best_fit: documents of at most train.seq_length tokens are never cut, each "
        "is put where the least room is left, and what remains of a sample is padding.",
    )
    reset_attention_mask: bool = Field(
        default=False,
        description=(
            "Restrict attention to the token's own document, where several documents share a "
            "sample."
        ),
    )
    reset_position_ids: bool = Field(
        default=False, description="Restart position ids at 0 with each document of a sample."
    )
    eod_mask_loss: bool = Field(
        default=False,
        description="Leave the first token of each document out of the loss: the tokens before it "
        "belong to another document.",
    )
    loss_on: Literal["auto", "all", "answers"] = Field(
        default="auto",
        description="Tokens that count in the loss: answers: those that the loss mask of a data "
        "set marks, the answers of conversations; all; auto: answers, in data sets with a mask.",
    )
    cache: FilePath = Field(
        default="",
        description=(
            "Folder for the trained tokenizer and the token files; empty: the folder data in "
            "train.folder."
        ),
    )

    @property
    def blend_changes(self) -> bool:
        """Return True if the weights of the blend change."""
        return any(len(part.points) > 1 for part in self.blend)

    @property
    def blend_names(self) -> list[str]:
        """The name of each data set of the blend, each once."""
        names = list[str]()
        for part in self.blend:
            name = part.name or _name_of_source(names_of(part.source)[0])
            # of several of one name the later ones have a number
            unique = name
            number = 1
            while unique in names:
                number += 1
                unique = f"{name}-{number}"
            names.append(unique)
        return names

    @property
    def sources(self) -> list[str]:
        """The texts and data sets of the training data."""
        sources = [part.source for part in self.blend] or [self.source]
        return [", ".join(names_of(source)) for source in sources]

    @property
    def of_characters(self) -> bool:
        """Return True if the characters of the text are its tokens."""
        return self.tokenizer == CHARACTERS

    @property
    def tokenizer_file(self) -> Path | None:
        """The file that data.tokenizer names, None if it names none."""
        if not self.tokenizer or self.of_characters:
            return None
        return Path(self.tokenizer)

    def has_text(self) -> bool:
        """Return True if any training data on this machine is text, for which a tokenizer is
        needed, and not tokens already. URLs are not looked at, and may be either."""
        here = [source for source in self.sources if not is_url(source)]
        return not all(with_suffix(Path(source), ".idx").is_file() for source in here)
