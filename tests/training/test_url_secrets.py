"""Passwords of URLs: no run folder, tracker or record of data has them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megaprec.text.sources import TextSource
from megaprec.tokens.files import with_suffix
from megaprec.tokens.places import name_in_url, path_of
from megaprec.url_secrets import (
    has_password,
    masked,
    masked_inside,
    without_passwords,
    without_user_of,
)
from tests.refusals import raises
from tests.runs import write_run
from tests.tokens.ranged_server import Conduct, serving
from tools import cli
from tools.analysis.report.page import html
from tools.analysis.report.run import _read_keys
from tools.analysis.report.sections import _key_row
from tools.config.resolved_run import resolve_run
from tools.config.run_file import load_run
from tools.journal import trackers
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
        ("data.source", "s3://key:hid/den+hidden@bucket/tokens"),
        ("data.source", "https://me:/?#hidden@host/tokens"),
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
        "https://host:8080/a@b/c",
        "http://[::1]:8080/a@b/c",
        "ftp://anonymous:@host/x@y",
        "s3://bucket/a:b@c",
    ],
)
def test_what_is_no_password_is_no_problem(source: str) -> None:
    assert load_run(None, [*RUN, f"data.source={source}"]).data.source == source
    assert not has_password(source)
    assert masked(source) == source


@pytest.mark.parametrize(
    "key",
    [
        "train.folder",
        "parallel.schedule_file",
        "data.tokenizer",
        "data.chat_template",
        "data.cache",
        "data.lm_eval_folder",
    ],
)
def test_a_key_that_holds_a_path_takes_no_url_and_no_later_check_reads_it(key: str) -> None:
    require_refused("config.url_of_path", key, [*RUN])


@pytest.mark.parametrize("key", ["train.init_from", "train.branch_from", "checkpoint.folder"])
def test_a_place_of_checkpoints_has_no_password_and_no_server_is_asked_with_one(key: str) -> None:
    run = [*RUN]
    if key.endswith("_from"):
        run.remove("model.preset=llama-demo")
    require_refused("config.url_password", key, run)


def require_refused(code: str, key: str, run: list[str]) -> None:
    """A URL with a password is refused in one line that does not show it."""
    with raises(code, key=key) as caught:
        resolve_run(None, [*run, f"{key}=s3://name:hidden@bucket/x"])
    said = [*caught.value.problems, *(str(problem.fields) for problem in caught.value.problems)]
    assert len(caught.value.problems) == 1
    assert "hidden" not in "".join(said)


@pytest.mark.parametrize(
    ("scheme", "variable"),
    [("s3", "AWS_SECRET_ACCESS_KEY=..."), ("ssh", "FSSPEC_SFTP_"), ("ftp", "FSSPEC_FTP_PASSWORD")],
)
@pytest.mark.parametrize("slashes", ["//", "/"])
def test_the_way_out_is_that_of_the_kind_of_url(scheme: str, variable: str, slashes: str) -> None:
    """One slash is left of a URL that was taken for a path."""
    with raises("config.url_password", environment=re.compile(variable)):
        load_run(None, [*RUN, f"data.source={scheme}:{slashes}me:hidden@host/x"])


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


SECRETS = "X-Amz-Credential=s3cr3t/a/b&X-Amz-Signature=s3cr3t&sig=s3cr3t&token=s3cr3t&key=s3cr3t"
COMMANDS = (
    "train my.toml data.source={url} train.folder=one",
    "train my.toml data.source={other} train.folder=two",
    "train my.toml data.source={other} train.folder=one train.steps=4 --allow data",
    "train my.toml data.source={url}&changed train.folder=one train.steps=5",
    "train my.toml data.source={gone} train.folder=three",
    "compare one two",
    "compare one two --json",
    "report one -o one.html",
    "inspect one",
    "plan my.toml data.source={url}",
    "evaluate one --data {url}",
    "evaluate one --json --data named={user}",
    "evaluate one --data {gone}",
    "data build {user} built --vocab-size 300",
    "data build {gone} built2 --vocab-size 300",
    "data inspect built",
    "data inspect {user}",
    "data verify built",
    "data verify {url}",
    "data tokenizer {user} learned.model --vocab-size 300",
    "init {url} -o written.toml",
    "bisect one two",
)


@pytest.mark.slow
def test_no_command_prints_or_keeps_a_secret_of_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """But the run files: the user's own, and that in the run folder, for its owner alone."""
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ended = dict[str, int]()
    said = ""
    with serving(tmp_path, Conduct()) as server:
        url = f"{server}/text.txt?{SECRETS}"
        places = {
            "url": url,
            "other": url.replace("s3cr3t", "s3cr3t2"),
            "user": url.replace("http://", "http://me:s3cr3t@"),
            "gone": url.replace("text", "none"),
        }
        for command in COMMANDS:
            words = [word.format(**places) for word in command.split()]
            try:
                ended[command] = cli.main(words)
            except SystemExit as end:
                ended[command] = int(end.code or 0)
            out, err = capfd.readouterr()
            shown = out + err
            assert "s3cr3t" not in shown, (command, shown)
            said += shown
    wrong = [command for command, code in ended.items() if bool(code) is not is_refused(command)]
    assert not wrong, said
    kept = {
        path for path in tmp_path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()
    }
    run_files = {tmp_path / "one" / "run.toml", tmp_path / "two" / "run.toml"}
    assert kept == run_files | {tmp_path / "written.toml"}
    assert {path.stat().st_mode & 0o077 for path in run_files} == {0}
    assert not list(tmp_path.rglob("*s3cr3t*"))


def is_refused(command: str) -> bool:
    return "{gone}" in command or command == "data inspect {user}"


@pytest.mark.parametrize(
    ("url", "suffix", "beside_it"),
    [
        ("https://h/a/x?sig=a/b?c", ".idx", "https://h/a/x.idx?sig=a/b?c"),
        ("http://h/x", ".bin", "http://h/x.bin"),
        ("memory://a/b?c", ".idx", "memory://a/b?c.idx"),
    ],
)
def test_the_files_of_a_data_set_stand_before_what_is_asked_of_a_web_page(
    url: str, suffix: str, beside_it: str
) -> None:
    assert str(with_suffix(path_of(url), suffix)) == beside_it
    assert "sig" not in name_in_url(path_of(url))


@pytest.mark.parametrize("sign", ["\x1b", "\x00", "\x9b", "\ud800", "\x7f"])
def test_a_page_shows_signs_that_control_a_terminal_as_text(sign: str) -> None:
    shown = html(f"a{sign}[31mb\tc\nd")
    assert shown.isascii() and sign not in shown
    assert shown.startswith("a\\") and shown.endswith("[31mb\tc\nd")


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

    monkeypatch.setattr(trackers, "Feed", feed)
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
    text = '[data]\nsource = "https://host/a?signature=s3cret"  # default\n'
    (key,) = _read_keys(text)
    assert _key_row(key) == ("data.source", '"https://host/a?***"', "default")


def test_what_a_library_says_of_a_cut_password_is_masked() -> None:
    url = "s3://key:hid/den@bucket/x"
    said = without_user_of(url, 'Invalid bucket name "key:hid" of key:hid/den@bucket')
    assert said == 'Invalid bucket name "***" of ***@bucket'


def test_the_record_of_a_data_set_has_no_password() -> None:
    source = TextSource("https://me:hidden@host/text?signature=hidden", Path("/"), ())
    assert source.identity()["name"] == "https://***@host/text?***"
