"""Passwords of URLs: no run folder, tracker or record of data has them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megaprec.data.text import Source
from megaprec.url_secrets import has_password, masked, masked_inside, without_passwords
from tests.refusals import raises
from tools.analysis.report.run import Key
from tools.analysis.report.sections import _key_row
from tools.config.run_file import load_run
from tools.convert.initial import resolve_run
from tools.journal.trackers import _in_a_line
from tools.training import recording

RUN = [
    "model.preset=llama-demo",
    "train.steps=1",
    "train.seq_length=8",
    "train.global_batch=1",
    "train.micro_batch=1",
]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.source", "https://me:hidden@host/tokens"),
        ("data.source", "https://hidden@host/tokens"),
        ("data.source", "sftp://me:hidden@host/tokens"),
        ("data.blend", '{"https://me:hidden@host/a" = 0.5, "b" = 0.5}'),
        ("data.validation", '{more = "ftp://me:hidden@host/a"}'),
    ],
)
def test_a_run_file_has_no_password_of_a_url(key: str, value: str) -> None:
    with raises("config.url_password", key=key) as caught:
        load_run(None, [*RUN, f"{key}={value}"])
    said = [*caught.value.problems, *(str(problem.fields) for problem in caught.value.problems)]
    assert "hidden" not in "".join(said)


@pytest.mark.parametrize(
    "source",
    [
        "abfs://container@account/a",
        "s3://bucket/a",
        "hf://datasets/a/b@main/c",
        "github://org:repo@main/data/x.jsonl",
        "git://repo:ref@file",
        "ftp://anonymous:@host/x",
        "sftp://alice@host/x",
    ],
)
def test_what_is_no_password_is_no_problem(source: str) -> None:
    assert load_run(None, [*RUN, f"data.source={source}"]).data.source == source
    assert not has_password(source)
    assert masked(source) == source


@pytest.mark.parametrize(
    "key",
    [
        "train.init_from",
        "train.branch_from",
        "train.folder",
        "parallel.schedule_file",
        "data.tokenizer",
        "data.chat_template",
        "data.cache",
        "data.lm_eval_folder",
    ],
)
def test_a_key_that_holds_a_path_takes_no_url_and_no_later_check_reads_it(key: str) -> None:
    run = [*RUN, f"{key}=s3://name:hidden@bucket/x"]
    if key.endswith("_from"):
        run.remove("model.preset=llama-demo")
    with raises("config.url_of_path", key=key) as caught:
        resolve_run(None, run)
    said = [*caught.value.problems, *(str(problem.fields) for problem in caught.value.problems)]
    assert len(caught.value.problems) == 1
    assert "hidden" not in "".join(said)


@pytest.mark.parametrize(
    ("scheme", "variable"),
    [("s3", "AWS_SECRET_ACCESS_KEY=..."), ("ssh", "FSSPEC_SFTP_"), ("ftp", "FSSPEC_FTP_PASSWORD")],
)
def test_the_way_out_is_that_of_the_kind_of_url(scheme: str, variable: str) -> None:
    with raises("config.url_password", environment=re.compile(variable)):
        load_run(None, [*RUN, f"data.source={scheme}://me:hidden@host/x"])


def test_a_run_that_was_saved_with_a_password_is_read_with_a_note(tmp_path: Path) -> None:
    source = "sftp://me:hidden@host/tokens"
    config = load_run(None, [*RUN, "data.source=sftp://host/tokens"])
    saved = config.save_resolved(tmp_path)
    saved.write_text(saved.read_text().replace("sftp://host/tokens", source))
    resumed = load_run(saved)
    assert resumed.data.source == source
    (note,) = [note for note in resumed.notes if note.startswith("data.source")]
    assert 'data.source="sftp://host/tokens" resumes the run without it' in note
    assert "hidden" not in note
    with raises("config.url_password", key="data.source"):
        load_run(saved, [f"data.source={source}"])


def test_a_value_without_passwords_is_else_the_same() -> None:
    blend = [{"source": ["https://u:hidden@h/a?b", "s3://k:hidden@b/c", "git://a:b@c"]}]
    assert without_passwords(blend) == [{"source": ["https://h/a?b", "s3://b/c", "git://a:b@c"]}]


class Sent(Exception):
    """What a tracker would have been sent."""


def test_trackers_are_sent_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "https://host/tokens?X-Amz-Signature=s3cret"
    config = load_run(None, [*RUN, f"data.source={source}", 'log.to=["tensorboard"]'])
    assert config.data.source == source

    def feed(name: str, folder: Path, settings: Any, step: int) -> None:
        raise Sent(json.dumps(settings))

    class Progress:
        step = 0

    monkeypatch.setattr(recording, "Feed", feed)
    nothing: Any = None
    run: Any = recording.record_run
    with pytest.raises(Sent) as sent, run(config, nothing, None, Progress, nothing):
        pass
    assert '"https://host/tokens?***"' in str(sent.value) and "s3cret" not in str(sent.value)
    sent_tables = json.loads(str(sent.value))
    sent_tables["data"]["source"] = source
    assert sent_tables == config.model_dump(mode="json")


def test_keys_and_values_of_tables_are_masked_inside() -> None:
    table = {"https://u:hidden@h/a": [1, None, ("sftp://u:hidden@h/b", True)]}
    assert masked_inside(table) == {"https://***@h/a": [1, None, ["sftp://u:***@h/b", True]]}


def test_the_error_of_a_tracker_shows_no_password() -> None:
    error = ConnectionError("POST https://me:hidden@tracker/api: no answer")
    assert _in_a_line(error) == "ConnectionError: POST https://***@tracker/api: no answer"


def test_a_report_shows_no_secret() -> None:
    _, value, _ = _key_row(Key("data.source", '"https://host/a?signature=s3cret"', "default"))
    assert value == '"https://host/a?***"'


def test_the_record_of_a_data_set_has_no_password() -> None:
    source = Source("https://me:hidden@host/text?signature=hidden", Path("/"), ())
    assert source.identity()["name"] == "https://***@host/text?***"
