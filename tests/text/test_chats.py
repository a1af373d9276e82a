"""Conversations are the tokens that transformers makes of them, and exactly their answers count; what
would be misread is refused by name."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import Environment
from transformers import AutoTokenizer

from megaprec.text.build import build, prepare
from megaprec.text.chat_template import CHATML
from megaprec.text.chats import load_chats
from megaprec.text.readers import TextOptions
from megaprec.text.sources import TextSource, open_source
from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.training import train_sentencepiece
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.intact import contents_of
from tests.refusals import raises
from tests.text.chat_material import (
    CONVERSATIONS,
    FORGETFUL,
    MARKED,
    PUBLISHED,
    TOOLS,
    UNMARKED,
    make_tokenizer,
    turns,
    write_rows,
)
from tools.cli import main

Row = dict[str, Any]


def opened(rows: list[Row], tokenizer: Path, name: str = "tokenizer", **options: Any) -> TextSource:
    file = write_rows(tokenizer.parent.parent / "rows.jsonl", rows)
    return open_source(str(file), TextOptions(chats=load_chats(name, tokenizer), **options))


def built(rows: list[Row], tokenizer: Path, name: str = "tokenizer") -> IndexedDataset:
    prefix = tokenizer.parent.parent / "set"
    build(opened(rows, tokenizer, name), load_tokenizer(tokenizer), prefix, overwrite=True)
    return IndexedDataset(prefix)


def documents(dataset: IndexedDataset) -> list[tuple[list[int], list[int]]]:
    """The tokens and the mask of each document."""
    ends = np.cumsum([0, *dataset.document_lengths()]).tolist()
    return [
        (
            dataset.tokens(begin, end - begin).tolist(),
            dataset.counted(begin, end - begin).astype(int).tolist(),
        )
        for begin, end in pairwise(ends)
    ]


@pytest.mark.parametrize(
    "family",
    ["joins the system's text to the first question", "gathers what the system says first"],
)
def test_what_the_system_says_stands_where_the_template_puts_it_and_never_counts(
    family: str, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(tmp_path, PUBLISHED[family])
    theirs = AutoTokenizer.from_pretrained(tokenizer.parent)
    messages = turns("a question", " b ", "more", "d", system="be brief")
    found = documents(built([{"messages": messages}], tokenizer))
    ((ids, mask),) = found
    assert ids == theirs.apply_chat_template(messages)["input_ids"]
    learned = theirs.decode([token for token, counts in zip(ids, mask, strict=True) if counts])
    assert [answer.strip() for answer in learned.split("<|im_end|>")] == ["b", "d", ""]


@pytest.mark.parametrize("template", [CHATML, MARKED, TOOLS])
def test_tokens_and_mask_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    tokenizer = make_tokenizer(tmp_path, template)
    theirs = AutoTokenizer.from_pretrained(tokenizer.parent)
    # a row with tools that its template leaves out is refused
    tools = None
    if template == TOOLS:
        tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    rows = [{"messages": messages, "tools": tools} for messages in CONVERSATIONS]
    found = documents(built(rows, tokenizer))
    assert len(found) == len(rows)
    for (ids, mask), row in zip(found, rows, strict=True):
        expected = theirs.apply_chat_template(
            row["messages"], tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids == expected["input_ids"]
        assert mask == expected["assistant_masks"]


def test_without_marks_in_the_template_an_answer_is_all_that_follows_its_prompt(
    tmp_path: Path,
) -> None:
    tokenizer = make_tokenizer(tmp_path, UNMARKED)
    theirs = AutoTokenizer.from_pretrained(tokenizer.parent)
    rows = [{"messages": messages} for messages in CONVERSATIONS]
    for (ids, mask), messages in zip(documents(built(rows, tokenizer)), CONVERSATIONS, strict=True):
        assert ids == theirs.apply_chat_template(messages)["input_ids"]
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        answered = theirs.decode([token for token, counts in zip(ids, mask, strict=True) if counts])
        assert answered == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_each_way_to_give_a_conversation_is_the_same(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, MARKED)
    messages = turns("how many?", "seven")
    shared = [{"from": "human", "value": "how many?"}, {"from": "gpt", "value": "seven"}]
    renamed = [{"role": turn["from"], "content": turn["value"]} for turn in shared]
    rows = [
        {"messages": messages},
        {"messages": json.dumps(messages)},
        {"messages": renamed},
        {"conversations": shared, "id": 3},
        {"prompt": "how many?", "completion": "seven"},
        {"prompt": messages[:1], "completion": messages[1:]},
    ]
    first, *others = documents(built(rows, tokenizer))
    assert others == [first] * 5


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_of_a_completion_of_messages_only_its_own_answers_count(
    tmp_path: Path, template: str
) -> None:
    tokenizer = make_tokenizer(tmp_path, template)
    messages = turns("a", "not this", "b", "but this")
    row = {"prompt": messages[:3], "completion": messages[3:]}
    whole, part = documents(built([{"messages": messages}, row], tokenizer))
    assert whole[0] == part[0]
    counted = load_tokenizer(tokenizer).decode(np.array(part[0])[np.array(part[1]) == 1].tolist())
    assert counted.strip() == "but this"


def test_a_plain_prompt_is_followed_by_its_completion_which_counts_with_its_end(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(make_tokenizer(tmp_path, None))
    rows = [{"prompt": "2 + 2 =", "completion": " 4 <|im_end|>"}, {"prompt": "", "completion": "x"}]
    found = documents(built(rows, tokenizer.path, "plain"))
    for (ids, mask), row in zip(found, rows, strict=True):
        prompt = tokenizer.encode(row["prompt"])
        answer = [*tokenizer.encode(row["completion"]), tokenizer.eos]
        assert ids == prompt + answer
        assert mask == [0] * len(prompt) + [1] * len(answer)


def test_a_tokenizer_is_learned_of_plain_prompts_and_completions(tmp_path: Path) -> None:
    rows = [{"prompt": f"what is {n}?", "completion": f"it is {n * n}"} for n in range(200)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    source = open_source(str(file), TextOptions(chats=load_chats("plain", None)))
    result = prepare(source, tmp_path / "set", vocab_size=280)
    assert result.counted == sum(sum(mask) for _, mask in documents(IndexedDataset(result.prefix)))


REFUSED = [
    ({"messages": turns("say <|im_end|>", "no")}, "data.chat_forged", "<|im_end|>"),
    ({"messages": turns("x", "y"), "tools": [{"<|im_start|>": 1}]}, "data.chat_forged", ""),
    ({"messages": [{"role": "assistnat", "content": "x"}]}, "data.chat_row", "assistnat"),
    ({"messages": [{"role": "assistant", "content": "x", "weight": 0}]}, "data.chat_row", "weight"),
    (
        {"conversations": [{"from": "gpt", "value": "x", "weight": 0}]},
        "data.chat_row",
        "weight",
    ),
    ({"messages": turns("x", "y"), "system": "be kind"}, "data.chat_row", "system"),
    ({"messages": turns("x", "y"), "documents": [{"text": "z"}]}, "data.chat_row", "documents"),
    ({"messages": turns("x", "y"), "tools": [{"name": "add"}]}, "data.chat_not_rendered", "tools"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}]},
        "data.chat_not_rendered",
        "tool_calls",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "reasoning": "as y"}]},
        "data.chat_not_rendered",
        "reasoning",
    ),
    ({"messages": []}, "data.chat_row", ""),
    ({"messages": [*turns("x"), "x"]}, "data.chat_row", "message 2"),
    ({"messages": [*turns("x"), {"role": "assistant"}]}, "data.chat_row", "message 2"),
    (
        {"messages": [*turns("x"), {"role": "assistant", "content": None}]},
        "data.chat_row",
        "message 2",
    ),
    ({"messages": [{"role": "gpt", "value": "x"}]}, "data.chat_row", "message 1"),
    ({"messages": [{**turns("x")[0], "from": "human", "value": "y"}]}, "data.chat_row", "another"),
    ({"messages": [{**turns("x")[0], "from": "gpt", "value": "x"}]}, "data.chat_row", "another"),
    ({"messages": [{"from": "human", "value": "x", "content": "y"}]}, "data.chat_row", "another"),
    ({"text": "x"}, "data.chat_fields", ""),
    ({"messages": turns("x"), "conversations": []}, "data.chat_fields", ""),
    ({"prompt": "x"}, "data.chat_fields", ""),
    (["x"], "data.chat_row", ""),
]


@pytest.mark.parametrize(("row", "code", "within"), REFUSED)
def test_a_row_that_would_be_misread_is_refused_or_left_out(
    tmp_path: Path, row: Row, code: str, within: str
) -> None:
    tokenizer = make_tokenizer(tmp_path, MARKED)
    good = {"messages": turns("x", "y")}
    with raises(code) as caught:
        list(opened([good, row], tokenizer))
    assert "rows.jsonl:2: " in str(caught.value) and within in str(caught.value)
    assert len([*opened([good, row, good], tokenizer, skip_bad=1)]) == 2


def test_what_is_not_the_text_of_a_message_is_refused_by_chatml(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, None)
    parts = [{"type": "text", "text": "x"}]
    for content, code in (
        (parts, "data.chat_not_rendered"),
        (None, "data.chat_row"),  # by every template
        (5, "data.chat_not_rendered"),
    ):
        with raises(code) as caught:
            list(
                opened([{"messages": [{"role": "user", "content": content}]}], tokenizer, "chatml")
            )
        assert "content" in str(caught.value)


def test_fields_that_say_nothing_to_a_model_hinder_no_row(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, MARKED)
    plain = {"messages": turns("x", "y")}
    noted = {
        "messages": [{**turn, "id": 7, "weight": 1} for turn in turns("x", "y")],
        "source": "z",
    }
    empty = {"messages": [{**turn, "tool_calls": [], "thinking": None} for turn in turns("x", "y")]}
    names = {"user": "human", "assistant": "gpt"}
    twice = {
        "messages": [
            {**turn, "from": names[turn["role"]], "value": turn["content"]}
            for turn in turns("x", "y")
        ]
    }
    rows = [plain, noted, empty, {**plain, "tools": [], "system": ""}, twice]
    read = documents(built(rows, tokenizer))
    assert read == read[:1] * len(rows)


def test_a_plain_row_says_what_it_lacks(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, None)
    for row in ({"messages": turns("x", "y")}, {"prompt": "x", "completion": "y", "system": "z"}):
        with raises("data.chat_row") as caught:
            list(opened([row], tokenizer, "plain"))
        assert re.search("prompt and completion|system", str(caught.value))


def test_a_template_that_forgets_earlier_turns_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, FORGETFUL)
    with raises("data.chat_not_rendered"):
        list(opened([{"messages": turns("a", "b", "c", "d")}], tokenizer))


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_templates_of_published_models_build_or_say_what_cannot_be_learned(
    family: str, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(tmp_path, PUBLISHED[family])
    theirs = AutoTokenizer.from_pretrained(tokenizer.parent)
    rows = [{"messages": turns("a", "b")}, {"messages": turns("a", "b", "c", "d")}]
    name = "tokenizer"
    if family == "thinks":
        with raises("data.chat_not_rendered", problem=re.compile(r"\+last.*{% generation %}")):
            list(opened(rows, tokenizer))
        name = "tokenizer+last"
    elif family == "begins to think":
        with raises("data.chat_not_rendered", problem=re.compile("marks answers")):
            list(opened(rows, tokenizer))
        marked = PUBLISHED[family].replace("{{ answer }}", "{% generation %}{{ answer }}")
        marked = marked.replace("{# end #}", "{% endgeneration %}")
        (tmp_path / "marked.jinja").write_text(marked)
        name = str(tmp_path / "marked.jinja")
    found = documents(built(rows, tokenizer, name))
    for (ids, mask), row in zip(found, rows, strict=True):
        messages = row["messages"]
        assert ids == theirs.apply_chat_template(messages)["input_ids"]
        learned = theirs.decode([token for token, counts in zip(ids, mask, strict=True) if counts])
        answers = [message["content"] for message in messages[1::2]]
        if family == "thinks":
            answers = answers[-1:]
        position = -1
        for answer in answers:
            position = learned.index(answer, position + 1)
        assert len(re.findall("[a-d]", re.sub("<[^>]*>", "", learned))) == len(answers)


def call(arguments: Any, **changes: Any) -> Row:
    """A message that calls a tool."""
    function = {"name": "count", "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls} | changes


OUTPUT = {"role": "tool", "content": "7"}
GATHERS = PUBLISHED["gathers what the system says first"]


def test_a_call_of_a_tool_without_content_is_learned_by_a_template_that_needs_null(
    tmp_path: Path,
) -> None:
    tokenizer = make_tokenizer(tmp_path, GATHERS)
    messages = [*turns("a", "b", "c"), call('{"x": 1}'), OUTPUT, *turns("", "d")[1:]]
    # as transformers 4 gives messages to a template
    program = Environment(trim_blocks=True, lstrip_blocks=True).from_string(GATHERS)
    written = program.render(messages=messages, bos_token="<|endoftext|>")
    for content in ({"content": None}, {}):
        given = {key: value for key, value in call('{"x": 1}').items() if key != "content"}
        row = {"messages": [*messages[:3], given | content, *messages[4:]]}
        ((ids, mask),) = documents(built([row], tokenizer))
        theirs = AutoTokenizer.from_pretrained(tokenizer.parent)
        assert theirs.decode(ids) == written
        learned = theirs.decode([token for token, counts in zip(ids, mask, strict=True) if counts])
        called = '(calls)(call)functioncount{"x": 1}(/call)(/calls)<|im_end|>'
        assert learned == f"b<|im_end|>{called}d<|im_end|>"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (call('{"x": 1}', content=""), r"leaves out tool_calls of message 2; give a copy"),
        (call('{"x": 1}', content="so"), r"leaves out tool_calls of message 2; give a copy"),
        (call({"x": 1}), r"are objects; give them as text"),
        ({"role": "assistant", "content": "b", "reasoning": "as"}, r"out reasoning; give a copy"),
    ],
)
def test_what_a_template_leaves_out_of_an_answer_is_refused_with_a_way_out(
    answer: Row, problem: str, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(tmp_path, GATHERS)
    messages = [*turns("a"), answer, OUTPUT, *turns("", "d", "e", "f")[1:]]
    with raises("data.chat_not_rendered", problem=re.compile(problem)):
        list(opened([{"messages": messages}], tokenizer))


@pytest.mark.parametrize(
    ("contents", "name", "problem"),
    [
        (("a", "<think>so</think>b"), "tokenizer", r"content of message 2; give a copy"),
        (("a", "<think>so</think>b", "c", "d"), "tokenizer", r"content of message 2; put \+last"),
        (("a", "<think>so</think>b", "c", "d"), "tokenizer+last", None),
    ],
)
def test_an_answer_that_a_template_shortens_is_refused_if_it_would_be_learned(
    contents: tuple[str, ...], name: str, problem: str | None, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(tmp_path, PUBLISHED["asks for the answer within the question"])
    row = {"messages": turns(*contents)}
    if problem:
        with raises("data.chat_not_rendered", problem=re.compile(problem)):
            list(opened([row], tokenizer, name))
        return
    ((ids, mask),) = documents(built([row], tokenizer, name))
    tokens = load_tokenizer(tokenizer)
    learned = [token for token, counts in zip(ids, mask, strict=True) if counts]
    assert tokens.decode(learned).startswith("d")


@pytest.mark.parametrize("template", [CHATML, UNMARKED])
def test_of_the_last_answers_only_these_count(template: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, template)
    several = {"messages": [*turns("a", "b", "c", "d"), {"role": "assistant", "content": "e"}]}
    ids, mask = documents(built([several], tokenizer, "tokenizer+last"))[0]
    whole_ids, whole_mask = documents(built([several], tokenizer))[0]
    assert ids == whole_ids and sum(mask) < sum(whole_mask)
    learned = load_tokenizer(tokenizer).decode(
        [token for token, counts in zip(ids, mask, strict=True) if counts]
    )
    assert [letter for letter in learned if letter in "abcde"] == ["d", "e"]


@pytest.mark.parametrize(
    ("template", "name", "code"),
    [
        (None, "tokenizer", "data.chat_template_none"),
        ("{% for %}", "tokenizer", "data.chat_template_broken"),
        (MARKED, "nosuch", "data.chat_template_missing"),
    ],
)
def test_a_template_that_is_none_is_refused(
    tmp_path: Path, template: str | None, name: str, code: str
) -> None:
    with raises(code):
        load_chats(name, make_tokenizer(tmp_path, template))


def test_a_template_cannot_leave_its_sandbox_nor_ask_for_the_day(tmp_path: Path) -> None:
    for template in ("{{ ''.__class__.__mro__ }}", "{{ strftime_now('%Y') }}"):
        tokenizer = make_tokenizer(tmp_path, template)
        with raises("data.chat_not_rendered"):
            list(opened([{"messages": turns("a", "b")}], tokenizer))


# as published: some have a day of their own where they are not told the day
ASKS_FOR_THE_DAY = """\
{%- set day = strftime_now("%d %b") if strftime_now is defined else "26 Jul" %}
{%- for message in messages %}
{{- '<|im_start|>' + day + ' ' + message.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>' + day + ' ' }}{% endif %}
"""


def test_a_template_that_asks_for_the_day_is_told_with_a_way_out(tmp_path: Path) -> None:
    row = {"messages": turns("a", "b")}
    tokenizer = make_tokenizer(tmp_path, ASKS_FOR_THE_DAY)
    other = tmp_path / "other"
    other.mkdir()
    (note,) = load_chats("tokenizer", tokenizer).notes
    assert "strftime_now" in note and "a copy of the template with a day" in note
    ids, _ = documents(built([row], tokenizer))[0]
    assert load_tokenizer(tokenizer).decode(ids).count("26 Jul") == 2
    assert load_chats("tokenizer", make_tokenizer(other, UNMARKED)).notes == ()
    must_have = ASKS_FOR_THE_DAY.replace(' if strftime_now is defined else "26 Jul"', "")
    with raises("data.chat_not_rendered", problem=re.compile("template with a day of its own")):
        list(opened([row], make_tokenizer(other, must_have)))


def test_a_tokenizer_without_the_tokens_of_turns_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, None)
    with raises("data.chat_tokens_missing", missing="<|im_start|> and <|im_end|>"):
        load_chats("chatml", tmp_path / "plain.json")
    texts = ["words of a text " * 20, "and others " * 20]
    with raises("data.chat_sentencepiece"):
        load_chats("chatml", train_sentencepiece(texts, tmp_path / "small", 275, False))
    with raises("data.chat_without_tokenizer"):
        load_chats("chatml", None)


def test_workers_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(tmp_path, MARKED)
    source = opened([{"messages": messages} for messages in CONVERSATIONS] * 3, tokenizer)
    monkeypatch.setattr("megaprec.text.build.CHUNK_CHARS", 500)
    for workers in (1, 2):
        prefix = tmp_path / f"set{workers}"
        build(source, load_tokenizer(tokenizer), prefix, workers=workers)
    for suffix in ("bin", "idx", "loss_mask"):
        one, two = ((tmp_path / f"set{n}.{suffix}").read_bytes() for n in (1, 2))
        assert one == two


def test_an_interrupted_build_goes_on_to_the_same_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(tmp_path, MARKED)
    source = opened([{"messages": messages} for messages in CONVERSATIONS] * 3, tokenizer)
    build(source, load_tokenizer(tokenizer), tmp_path / "whole")
    monkeypatch.setattr("megaprec.text.build.CHUNK_CHARS", 200)
    monkeypatch.setattr("megaprec.text.build.RESUME_CHARS", 300)
    called: list[int] = []

    def stop(*_: int) -> None:
        called.append(1)
        if len(called) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(source, load_tokenizer(tokenizer), tmp_path / "set", on_progress=stop)
    assert (tmp_path / "set.loss_mask.part").exists()
    build(source, load_tokenizer(tokenizer), tmp_path / "set")
    for suffix in ("bin", "idx", "loss_mask"):
        whole, resumed = ((tmp_path / f"{n}.{suffix}").read_bytes() for n in ("whole", "set"))
        assert whole == resumed
    assert not [*tmp_path.glob("*.part")]


def test_a_mask_that_changes_or_is_lost_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, MARKED)
    dataset = built([{"messages": messages} for messages in CONVERSATIONS], tokenizer)
    contents_of(dataset)
    file = tmp_path / "set.loss_mask"
    content = bytearray(file.read_bytes())
    file.write_bytes(content[:-1])
    with raises("data.loss_mask_size"):
        IndexedDataset(tmp_path / "set")
    content[3] ^= 16
    file.write_bytes(content)
    with raises("data.digest_differs"):
        contents_of(IndexedDataset(tmp_path / "set"))
    file.unlink()
    with raises("data.loss_mask_missing"):
        contents_of(IndexedDataset(tmp_path / "set"))
    assert main(["data", "verify", str(tmp_path / "set")]) == 2


def test_another_template_is_another_data_set_and_a_text_has_no_mask(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, MARKED)
    rows = [{"messages": messages} for messages in CONVERSATIONS]
    prefix = tmp_path / "set"
    assert not prepare(opened(rows, tokenizer), prefix, tokenizer=tokenizer).reused
    assert prepare(opened(rows, tokenizer), prefix, tokenizer=tokenizer).reused
    other = opened(rows, tokenizer, "chatml")
    with raises("data.build_exists"):
        prepare(other, prefix, tokenizer=tokenizer)
    # the same text, of which something else counts
    (tmp_path / "unmarked.jinja").write_text(UNMARKED)
    unmarked = opened(rows, tokenizer, str(tmp_path / "unmarked.jinja"))
    with raises("data.build_exists"):
        prepare(unmarked, prefix, tokenizer=tokenizer)
    with IndexedWriter(prefix, 300) as writer:
        writer.add_document([1, 2])
    assert not (tmp_path / "set.loss_mask").exists()
    assert not IndexedDataset(prefix).has_mask


def test_inspect_shows_which_tokens_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedWriter(tmp_path / "set", 100, has_mask=True) as writer:
        writer.extend([7, 8], np.array([2]), np.array([False, False]))
        counted = np.array([False, True, True, False])
        writer.extend([1, 2, 3, 4], np.array([4]), counted)
    prefix = f"{tmp_path}/set"
    assert main(["data", "inspect", prefix]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-7:] == [
        *["--- document 0: 2 tokens, 0 count", "- 7 8", ""],
        *["--- document 1: 4 tokens, 2 count", "- 1", "+ 2 3", "- 4"],
    ]
    assert main(["data", "inspect", prefix, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["counted_tokens"], document["counted_share"]) == (2, 2 / 6)
