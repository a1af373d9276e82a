"""A tokenizer and the settings beside it mean what transformers reads in them, or are refused by
name."""

import errno
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megaprec import parsing
from megaprec.errors import UserError
from megaprec.text import tokenizer as tokenizer_module
from megaprec.text.build import prepare
from megaprec.text.sources import open_source
from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.tokenizer_files import protobuf_fields, tokenizer_in
from megaprec.text.training import train_hugging_face
from megaprec.text.workers import Chunk, encode_chunks
from tests.refusals import raises, sentence

pytest.importorskip("tokenizers", reason="needs the package tokenizers (pip install tokenizers)")
TEXT = "the model learns what the text says, and the text says what it has seen\n" * 20
END = "<|endoftext|>"  # token 0
SIZE = 280
Json = dict[str, Any]


@pytest.fixture(scope="module")
def definition(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_hugging_face(
        [TEXT], tmp_path_factory.mktemp("tok") / "tokenizer.json", SIZE
    ).read_text("utf-8")


@pytest.fixture(scope="module")
def pieces() -> bytes:
    return _pieces()


def _pieces(**options: Any) -> bytes:
    model = io.BytesIO()
    given = {"vocab_size": 330, "model_type": "bpe", "byte_fallback": True, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        **given,
    )
    return model.getvalue()


def written(
    folder: Path, definition: str, change: Callable[[Json], object] = dict, **beside: object
) -> Path:
    """A changed tokenizer.json, with files of settings beside it; returns its path."""
    said = json.loads(definition)
    change(said)
    for name, content in {"tokenizer": said, **beside}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder / "tokenizer.json"


def added(content: str, number: int, special: bool = True) -> Json:
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }
    return {"id": number, "content": content, **flags}


def _words(said: Json) -> None:
    said["added_tokens"], said["pre_tokenizer"] = [], {"type": "WhitespaceSplit"}
    said["model"] = {"type": "WordLevel", "vocab": {"the": 0, "text": 1}, "unk_token": "[UNK]"}


READ_OTHERWISE: dict[str, tuple[Callable[[Json], object], str]] = {
    "splits at random": (
        lambda said: said["model"].update(dropout=0.1),
        sentence("data.tokenizer_dropout", dropout=0.1),
    ),
    "added after a gap": (
        lambda said: said["added_tokens"].append(added("<x>", SIZE + 7)),
        sentence("data.added_token_moves", content="<x>", id=SIZE + 7, number=SIZE),
    ),
    "added with another id": (
        lambda said: said["added_tokens"][0].update(id=5),
        sentence("data.added_token_moves", id=5, number=0),
    ),
    "two of one id": (
        lambda said: said["model"]["vocab"].update(zzz=5),
        sentence("data.token_id_twice", first="%", second="zzz", number=5),
    ),
    "beyond reason": (
        lambda said: said["model"]["vocab"].update(zzz=4 * 10**9),
        sentence("data.token_id_too_large", tokens="zzz", largest=4 * 10**9),
    ),
    "ends unclear": (
        lambda said: said["added_tokens"].append(added("</s>", SIZE)),
        sentence("data.end_token_ambiguous", candidates="<|endoftext|> and </s>"),
    ),
}


@pytest.mark.parametrize("case", READ_OTHERWISE)
def test_what_the_library_would_read_otherwise_is_refused_by_name(
    case: str, definition: str, tmp_path: Path
) -> None:
    change, why = READ_OTHERWISE[case]
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/tokenizer.json") + ".*" + why):
        load_tokenizer(written(tmp_path, definition, change))


def test_a_key_given_twice_is_refused_by_name(definition: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        definition.replace('"vocab": {', '"vocab": {"the": 7, "the": 9, ', 1)
    )
    with raises("data.definition_unreadable", error="it has the key 'the' twice"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("value", ['"\\ud800"', "1" * 60, "[" * 5000 + "]" * 5000])
def test_values_that_no_tokenizer_has_are_refused(
    value: str, definition: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(
        definition.replace('"dropout": null', f'"dropout": {value}', 1)
    )
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


SETTINGS: dict[str, tuple[Json, str]] = {
    "an end that is no token": (
        {"tokenizer_config": {"eos_token": "<|im_end|>"}},
        sentence("data.special_token_missing", setting="eos_token = '<|im_end|>'"),
    ),
    "another token": (
        {"special_tokens_map": {"cls_token": {"content": "[CLS]"}}},
        sentence("data.special_token_missing", setting="cls_token = '[CLS]'"),
    ),
    "a further token": (
        {"special_tokens_map": {"additional_special_tokens": ["<a>"]}},
        sentence("data.special_token_missing", setting=re.compile("'<a>'")),
    ),
    "a further token, as transformers 5 writes it": (
        {"tokenizer_config": {"extra_special_tokens": ["<a>"]}},
        sentence("data.special_token_missing", setting="extra_special_tokens: '<a>'"),
    ),
    "a further token with a role": (
        {
            "tokenizer_config": {
                "model_specific_special_tokens": {"image_token": {"content": "<a>"}}
            }
        },
        sentence("data.special_token_missing", setting="model_specific_special_tokens: '<a>'"),
    ),
    "further tokens that are no list": (
        {"tokenizer_config": {"extra_special_tokens": "<a>"}},
        sentence("data.special_not_list", key="extra_special_tokens", values="<a>"),
    ),
    "an added token": (
        {"added_tokens": {"<a>": SIZE}},
        sentence(
            "data.added_token_conflict",
            number=SIZE,
            token="<a>",
            name="tokenizer.json",
            has="does not have",
        ),
    ),
    "an added token, by id": (
        {"tokenizer_config": {"added_tokens_decoder": {str(SIZE): {"content": "<a>"}}}},
        sentence(
            "data.added_token_conflict",
            number=SIZE,
            token="<a>",
            name="tokenizer.json",
            has="does not have",
        ),
    ),
    "another id": (
        {"tokenizer_config": {"added_tokens_decoder": {"7": {"content": END}}}},
        sentence(
            "data.added_token_conflict", number=7, token=END, name="tokenizer.json", has="has as 0"
        ),
    ),
    "a number": (
        {"tokenizer_config": {"eos_token": 0}},
        sentence("data.special_not_text", role="eos_token", value=0),
    ),
    "a list": ({"tokenizer_config": []}, sentence("megaprec.not_json_object")),
    "no JSON": ({"special_tokens_map": "{"}, sentence("megaprec.file_unreadable")),
    "a key twice": (
        {"tokenizer_config": '{"eos_token": "a", "eos_token": "b"}'},
        "it has the key 'eos_token' twice",
    ),
    "no id": (
        {"added_tokens": {"<a>": "x"}},
        sentence("data.special_id_not_number", token="<a>", number="x"),
    ),
    "no table": (
        {"tokenizer_config": {"added_tokens_decoder": [1]}},
        sentence("data.decoder_not_table"),
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_the_tokenizer_does_not_bear_out_are_refused_by_file_and_token(
    case: str, definition: str, tmp_path: Path
) -> None:
    beside, why = SETTINGS[case]
    with pytest.raises(UserError, match=f"^{tmp_path}/{next(iter(beside))}.json.*" + why):
        load_tokenizer(written(tmp_path, definition, **beside))


ENDS: dict[str, Json] = {
    "only the map": {"special_tokens_map": {"eos_token": "t"}},
    "the map differs": {
        "tokenizer_config": {"eos_token": END},
        "special_tokens_map": {"eos_token": "t"},
    },
    "the map differs from newer settings": {
        "tokenizer_config": {"eos_token": END, "added_tokens_decoder": {"0": added(END, 0)}},
        "special_tokens_map": {"eos_token": "t"},
    },
    "a table": {"tokenizer_config": {"eos_token": {"content": "t", "__type": "AddedToken"}}},
}


@pytest.mark.parametrize("case", ENDS)
def test_a_document_ends_with_the_token_that_transformers_reads(
    case: str, definition: str, tmp_path: Path
) -> None:
    transformers: Any = pytest.importorskip(
        "transformers", reason="needs transformers: the extra hf"
    )
    tokenizer = load_tokenizer(written(tmp_path, definition, **ENDS[case]))
    assert tokenizer.eos == transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    if tokenizer.eos:
        (*notes, ordinary) = tokenizer.notes
    else:
        (*notes, ordinary) = (*tokenizer.notes, "'t', which ends a document")
    assert "'t', which ends a document" in ordinary and len(notes) == ("differs" in case)
    assert all(
        "special_tokens_map.json" in note and "tokenizer_config.json" in note for note in notes
    )


@pytest.mark.parametrize("html", [False, True])
def test_the_usual_end_is_sought_among_special_tokens_first(
    html: bool, definition: str, tmp_path: Path
) -> None:
    """`</s>` may be a tag of HTML, as in Gemma's vocabulary."""
    change = [added("</s>", SIZE, special=False)] if html else []
    path = written(tmp_path, definition, lambda said: said["added_tokens"].extend(change))
    assert load_tokenizer(path).eos == 0


NOTES: dict[str, tuple[Callable[[Json], object], Json, str]] = {
    "code of its own": (
        dict,
        {"auto_map": {"AutoTokenizer": ["a.B", None]}},
        "code of the folder's own is not run",
    ),
    "a space before texts": (
        dict,
        {"add_prefix_space": True},
        "add_prefix_space = true is not followed, for pre_tok",
    ),
    "a key of another version": (
        lambda said: (said["model"].update(heat=3), said["pre_tokenizer"].update(cold=1)),
        {},
        "pre_tokenizer.cold, model.heat: the package tokenizers does not read it",
    ),
    "a flag of another version": (
        lambda said: said["added_tokens"][0].update(hot=1),
        {},
        "added_tokens.hot: the pack",
    ),
    "characters without a token": (
        lambda said: said.update(pre_tokenizer=None, decoder=None),
        {},
        "leaves out of texts what it has no token for",
    ),
}


@pytest.mark.parametrize("case", NOTES)
def test_what_other_programs_follow_and_what_gets_lost_is_noted(
    case: str, definition: str, tmp_path: Path
) -> None:
    change, config, why = NOTES[case]
    (note,) = load_tokenizer(written(tmp_path, definition, change, tokenizer_config=config)).notes
    assert why in note
    assert (
        load_tokenizer(
            written(tmp_path, definition, tokenizer_config={"add_prefix_space": False})
        ).notes
        == ()
    )


def test_an_old_spelling_that_the_library_takes_over_is_not_noted(
    definition: str, tmp_path: Path
) -> None:
    old = {"type": "Metaspace", "replacement": "_", "str_rep": "_", "add_prefix_space": True}
    path = written(tmp_path, definition, lambda said: said.update(pre_tokenizer=old, decoder=old))
    tokenizer = load_tokenizer(path)
    assert [note for note in tokenizer.notes if "does not read" in note] == []
    assert tokenizer.encode("the")[0] == tokenizer.vocabulary()["_"]


@pytest.mark.slow
def test_a_sentencepiece_model_that_is_cut_off_is_refused(pieces: bytes, tmp_path: Path) -> None:
    """At the border of two of its fields the library reads what is there, and takes its defaults
    for the rest."""
    kept = list(protobuf_fields(pieces))
    assert kept[-1][0] == 3
    ends = [len(pieces) - len(kept[-1][1]) - 2, *range(1, len(pieces), 997)]
    for end in ends:
        (tmp_path / "a.model").write_bytes(pieces[:end])
        with raises("data.not_a_tokenizer"):
            load_tokenizer(tmp_path / "a.model")


def test_settings_beside_a_tokenizer_model_count_as_beside_a_tokenizer_json(
    pieces: bytes, tmp_path: Path
) -> None:
    for name in ("tokenizer.model", "other.model"):
        (tmp_path / name).write_bytes(pieces)
    said = {"eos_token": "<s>", "added_tokens_decoder": {"2": {"content": "</s>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    assert [load_tokenizer(tmp_path / name).eos for name in ("tokenizer.model", "other.model")] == [
        1,
        2,
    ]
    (tmp_path / "added_tokens.json").write_text('{"<|im_end|>": 330}')
    with raises(
        "data.added_token_conflict", number=330, token="<|im_end|>", name="tokenizer.model"
    ):
        load_tokenizer(tmp_path / "tokenizer.model")


@pytest.mark.parametrize("special", [True, False])
def test_a_piece_that_settings_give_another_name_is_noted_if_no_text_can_hold_it(
    special: bool, pieces: bytes, tmp_path: Path
) -> None:
    """InternLM2's settings call unused pieces `<|im_end|>` and the like; special tokens are never read from a text."""
    (tmp_path / "tokenizer.model").write_bytes(pieces)
    said = {
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {"300": {"content": "<|im_end|>", "special": special}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    if not special:
        with raises(
            "data.added_token_conflict",
            number=300,
            token="<|im_end|>",
            name="tokenizer.model",
            has="does not have",
        ):
            load_tokenizer(tmp_path / "tokenizer.model")
        return
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    note, of_losses = tokenizer.notes
    assert "does not give texts back as they were" in of_losses and of_losses.endswith(
        "the sign U+2581"
    )
    assert (
        tokenizer.eos == 300
        and "tokenizer_config.json: '<|im_end|>' is token 300, which is " in note
    )


KINDS = {
    "a.model": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "a pointer of Git LFS",
    ),
    "b.model": (b"\x1f\x8b\x08\x00", "packed by gzip"),
    "c.pkl": (b"\x80\x04}\x94.", "perhaps a pickle"),
    "d.tiktoken": (b"IQ== 0\nIg== 1\n", "a vocabulary of tiktoken"),
    "merges.txt": (b"#version: 0.2\na b\n", "the merges of a tokenizer"),
    "vocab.json": (b'{"a": 0, "b": 1}', "a vocabulary (vocab.json) without merges"),
    "vocab.txt": (b"[PAD]\n[UNK]\nthe\n", "a list of words"),
    "tokenizer_config.json": (b'{"tokenizer_class": "X"}', "the settings of a tokenizer"),
    "config.json": (b'{"model_type": "llama"}', "the configuration of a model"),
    "tekken.json": (b'{"config": {}, "vocab": []}', "a tekken.json of Mistral"),
    "keras.json": (b'{"class_name": "Tokenizer", "config": {}}', "a tokenizer of Keras"),
    "keras_text.json": (b'"{}"', "holds no JSON object; tokenizers of Keras"),
    "bom.json": (b'\xef\xbb\xbf{"model": {}}', "a byte order mark"),
    "page.json": (b"<!DOCTYPE html>", "HTML"),
    "empty.model": (b"", "is empty"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_another_kind_is_called_what_it_is(name: str, tmp_path: Path) -> None:
    content, what = KINDS[name]
    (tmp_path / name).write_bytes(content)
    with raises(
        "data.not_a_tokenizer",
        path=tmp_path / name,
        why=re.compile(f"^it .*{re.escape(what)}"),
    ):
        load_tokenizer(tmp_path / name)


@pytest.mark.parametrize("workers", [1, 2])
def test_text_without_a_token_is_refused_in_any_number_of_processes(
    workers: int, definition: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(written(tmp_path, definition, _words))
    chunks = [Chunk(["the text"], [True]), Chunk(["the other"], [True])]
    with raises(
        "data.text_not_encodable", path=re.compile("tokenizer.json$"), problem=re.compile("UNK")
    ):
        list(encode_chunks(chunks, tokenizer, workers))


def test_a_folder_stands_for_the_tokenizer_in_it(definition: str, tmp_path: Path) -> None:
    assert tokenizer_in(tmp_path) == tmp_path
    # as in a checkpoint
    (tmp_path / "text.model").write_bytes(_pieces())
    assert tokenizer_in(tmp_path) == tmp_path / "text.model"
    (tmp_path / "tokenizer.model").write_bytes(_pieces())
    assert tokenizer_in(tmp_path) == tmp_path / "tokenizer.model"
    # as transformers takes it
    file = written(tmp_path, definition)
    assert tokenizer_in(tmp_path) == tokenizer_in(file) == file


def test_of_two_models_in_a_folder_none_is_chosen(tmp_path: Path) -> None:
    for name in ("text.model", "other.model"):
        (tmp_path / name).write_bytes(_pieces())
    assert tokenizer_in(tmp_path) == tmp_path


def test_in_a_folder_the_file_to_give_is_named(definition: str, tmp_path: Path) -> None:
    with raises(
        "data.tokenizer_file_unusable",
        problem=" is a folder",
        inside=re.compile(r"^a SentencePiece \.model or"),
    ):
        load_tokenizer(tmp_path)
    written(tmp_path, definition)
    with pytest.raises(
        UserError,
        match=sentence(
            "data.tokenizer_file_unusable",
            path=tmp_path,
            problem=" is a folder",
            inside=tmp_path / "tokenizer.json",
        ),
    ):
        load_tokenizer(tmp_path)


def test_tokens_of_unknown_text_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.model").write_bytes(_pieces(byte_fallback=False, vocab_size=60))
    (tmp_path / "a.txt").write_text("the 数 text 字 says", encoding="utf-8")
    source = open_source(str(tmp_path / "a.txt"))
    built = prepare(source, tmp_path / "out", tokenizer=tmp_path / "a.model")
    assert built.unknown == 2
    assert prepare(source, tmp_path / "out", tokenizer=tmp_path / "a.model").unknown == 2


def test_a_data_set_is_not_reused_when_documents_end_with_another_token(
    definition: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("the text")
    source = open_source(str(tmp_path / "a.txt"))
    path = written(tmp_path, definition, tokenizer_config={"eos_token": END})
    assert not prepare(source, tmp_path / "out", tokenizer=path).reused
    assert prepare(source, tmp_path / "out", tokenizer=path).reused
    written(tmp_path, definition, tokenizer_config={"eos_token": "t"})
    with raises("data.build_exists"):
        prepare(source, tmp_path / "out", tokenizer=path)


def test_no_text_is_made_of_ids_that_no_token_has(
    definition: str, pieces: bytes, tmp_path: Path
) -> None:
    (tmp_path / "a.model").write_bytes(pieces)
    for path in (written(tmp_path, definition), tmp_path / "a.model"):
        tokenizer = load_tokenizer(path)
        for wrong in (tokenizer.vocab_size, -1):
            with pytest.raises(
                UserError,
                match=sentence(
                    "data.token_missing",
                    path=path.name,
                    wrong=wrong,
                    vocab_size=tokenizer.vocab_size,
                ),
            ):
                tokenizer.decode([1, wrong])


def test_a_part_of_another_version_is_refused_by_name(definition: str, tmp_path: Path) -> None:
    path = written(tmp_path, definition, lambda said: said.update(lowercase=True))
    with raises(
        "data.tokenizer_unreadable",
        path=re.compile("tokenizer.json$"),
        reason=re.compile("^it does not know lowercase:"),
    ):
        load_tokenizer(path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_no_file_is_read_that_is_too_large_for_a_tokenizer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsing.read_regular, "__defaults__", (1 << 20,))
    monkeypatch.setattr(parsing.read_text, "__defaults__", (1 << 20,))
    with (tmp_path / name).open("wb") as file:
        file.write(b"{" if name.endswith("json") else b"")
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=f"{name}: .*it is larger than 1,048,576 bytes") as error:
        load_tokenizer(tmp_path / name)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        MemoryError(),
    ],
    ids=str,
)
@pytest.mark.parametrize("part", ["read_regular", "require_tried", "SentencePieceTokenizer"])
def test_a_want_of_memory_or_threads_is_not_blamed_on_the_file(
    part: str, failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text.model"
    file.write_bytes(_pieces())

    def fails(*_: object) -> None:
        raise failure

    monkeypatch.setattr(tokenizer_module, part, fails)
    with pytest.raises(MemoryError):
        load_tokenizer(file)


def test_a_file_that_could_not_be_read_is_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text.model"
    file.write_bytes(_pieces())

    def fails(*_: object) -> None:
        raise RuntimeError("a fault of the library")

    monkeypatch.setattr(tokenizer_module, "read_regular", fails)
    with raises("data.not_a_tokenizer", why="a fault of the library"):
        load_tokenizer(file)
