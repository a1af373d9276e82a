"""A path in a run file is relative to the working directory. Many expect it to be relative to the
run file, so the error that a file is not found says if it lies there.
"""

from pathlib import Path

from megaprec.tokens.files import with_suffix
from megaprec.tokens.places import STANDARD_LIBRARY, is_url

FROM_FILE = "file "  # begins the origin of a value of a run file


def working_directory_hint(origin: str, name: str) -> str:
    """Return what to add to the error that `name` is not found: whether it lies beside the run file
    that names it.

    Returns "" if `name` is found, or can be in one place only: it is absolute or from the command
    line, or the run file is in the working directory. origin: of the value `name`, as in
    `RunConfig.origin`.
    """
    # the prefix of a key's origin is followed by the path of the run file
    folder = Path(origin.removeprefix(FROM_FILE)).parent
    from_elsewhere = origin.startswith(FROM_FILE) and folder.resolve() != Path.cwd()
    if (
        not from_elsewhere
        or name == STANDARD_LIBRARY
        or is_url(name)
        or name.startswith(("/", "~"))
        or _is_there(Path(name))
    ):
        return ""
    if _is_there(folder / name):
        return (
            f"; {folder / name} is there: a path in a run file is relative to the working directory"
        )
    return f"; nor is there {folder / name}, beside the run file"


def _is_there(path: Path) -> bool:
    return path.exists() or with_suffix(path, ".idx").is_file()
