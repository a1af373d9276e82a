"""URLs in a run file that are refused: those with a password, which the run folder would keep, and
those of keys that hold a path of this machine.
"""

import re
from collections.abc import Mapping

from pydantic.fields import FieldInfo

from megaprec.errors import Problem
from megaprec.tokens.places import is_url
from megaprec.url_secrets import has_password, texts_in, without_passwords
from tools.config.tables.table import is_path
from tools.console.toml import Setting, toml

# a URL that was taken for a path has one slash
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*(?=:/)", re.IGNORECASE)
# by kind of URL, where the packages that read it look
_OF_AWS = "AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=..."
_OF_HTTP = """FSSPEC_HTTP='{"headers": {"Authorization": "Basic ..."}}'"""
_OF_SFTP = "FSSPEC_SFTP_PASSWORD=..."
ENVIRONMENT = {
    "s3": _OF_AWS,
    "s3a": _OF_AWS,
    "http": _OF_HTTP,
    "https": _OF_HTTP,
    "sftp": _OF_SFTP,
    "ssh": _OF_SFTP,
}


def take_urls(
    settings: dict[str, Setting], fields: Mapping[str, FieldInfo], saved_origin: str
) -> tuple[list[Problem], list[str]]:
    """Take the URLs of keys that hold a path out of `settings`. Return a problem for each of them
    and for each key with a password, and notes.

    saved_origin: of the keys of a run file that megaprec wrote, whose folder has the password
        already; "" if it wrote none.
    """
    problems = list[Problem]()
    notes = list[str]()
    for key, setting in [*settings.items()]:
        value = setting.value
        field = fields.get(key)
        with_password = [text for text in texts_in(value) if has_password(text)]
        shown = toml(value)
        origin = setting.origin
        if field is not None and is_path(field) and isinstance(value, str) and is_url(value):
            problems.append(Problem.of("config.url_of_path", key=key, value=shown, origin=origin))
            # no later check may read the path that it would be
            del settings[key]
        elif with_password and origin == saved_origin:
            shorter = toml(without_passwords(value))
            notes.append(
                f"{key} ({origin}): this run folder keeps the password of a URL; "
                f"{key}={shorter} resumes the run without it, with the password in the "
                f"environment: {_environment(with_password)}"
            )
        elif with_password:
            environment = _environment(with_password)
            problems.append(
                Problem.of(
                    "config.url_password",
                    key=key,
                    value=shown,
                    origin=origin,
                    environment=environment,
                )
            )
    return problems, notes


def _environment(texts: list[str]) -> str:
    """Return the variables in which the passwords of URLs are looked for."""
    variables = dict[str, None]()
    for text in texts:
        for scheme in SCHEME.findall(text.lower()):
            variables[ENVIRONMENT.get(scheme, f"FSSPEC_{scheme.upper()}_PASSWORD=...")] = None
    return ", ".join(variables)
