"""A server of S3 (moto's) on loopback, in a thread of the test's process, which fails as it is
told to."""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import boto3
import fsspec
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.server import ThreadedMotoServer  # noqa: F401 (makes moto's backends known)
from werkzeug.serving import make_server

BUCKET = "bucket"
Application = Callable[[dict[str, Any], Any], Iterable[bytes]]
SETTINGS = {
    "AWS_ACCESS_KEY_ID": "someone",
    "AWS_SECRET_ACCESS_KEY": "hunter2",
    "AWS_DEFAULT_REGION": "us-east-1",
}
FULL = b"""<?xml version="1.0"?><Error><Code>QuotaExceeded</Code>
<Message>The bucket has no room for more</Message></Error>"""
FORBIDDEN = b"""<?xml version="1.0"?><Error><Code>InvalidAccessKeyId</Code>
<Message>The AWS Access Key Id you provided does not exist in our records.</Message></Error>"""


@dataclass
class Conduct:
    """The behaviour of the server, which a test changes while it runs.

    full: objects whose names end so are refused for want of room. forbids: every request is refused.
    seconds: before each answer. ranges: of the bytes of objects that were asked for, with the
    object's name. changes: requests that change something.
    """

    full: str = ""
    forbids: bool = False
    seconds: float = 0.0
    ranges: list[tuple[str, str]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)


class _Failing:
    """The server with its conduct."""

    def __init__(self, application: Application, conduct: Conduct) -> None:
        self._application = application
        self._conduct = conduct

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        conduct = self._conduct
        path = environ["PATH_INFO"]
        method = environ["REQUEST_METHOD"]
        time.sleep(conduct.seconds)
        if conduct.forbids:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [FORBIDDEN]
        if method in ("PUT", "POST", "DELETE"):
            conduct.changes.append(f"{method} {path}")
            if conduct.full and path.endswith(conduct.full):
                start_response("403 Forbidden", [("Content-Type", "application/xml")])
                return [FULL]
        if method == "GET" and "HTTP_RANGE" in environ:
            conduct.ranges.append((path, environ["HTTP_RANGE"]))
        return self._application(environ, start_response)


@contextmanager
def serving(conduct: Conduct) -> Iterator[str]:
    """Serve an empty bucket; yield the URL of the server."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = _Failing(DomainDispatcherApplication(create_backend_app), conduct)
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    client = boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id="someone",
        aws_secret_access_key="hunter2",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    try:
        yield url
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def s3_place(conduct: Conduct, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of an empty place in a served bucket, which this process may change."""
    with serving(conduct) as url:
        for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        # a file system keeps the credentials that it has found
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield f"s3://{BUCKET}/{uuid.uuid4().hex}/run"
        conduct.seconds = 0
