"""The files beside a script, which it takes in with `source` or runs."""

import re
from pathlib import Path

from megaprec.parsing import read_text

SCRIPT = re.compile(r"[\w.-]+\.(?:sh|bash|slurm|sbatch)")
# the folder of the script, as scripts write it
OWN_FOLDER = re.compile(
    r"^(?:`pwd`|\$\(pwd\)|\$\{?(?:PWD|\w*(?:DIR|ROOT|HOME))\}?|\$\([^()]*dirname[^()]*\))/+"
)
NO_NAME = re.compile(r"[\s\0]")  # words of a command, and what no path may hold
LARGEST = 256 * 1024  # bytes
LONGEST_NAME = 250  # letters of a file with its folders


class FilesBeside:
    """The files in the folder of a script, and below it.

    path: of the script; None for a command line that is given as text, which has none.
    taken_in: the names of those that were read. guessed: files whose folders are not known, by how
    they are written, and those that were taken for them. has_moved: the script may have gone to
    another folder.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.taken_in: list[str] = []
        self.guessed: dict[str, str] = {}
        self.has_moved = False

    def read(self, written: str, may_guess: bool = True) -> tuple[str, str] | None:
        """Return name and text of a file; None if it is not there or has been read.

        may_guess: a file whose folder is not known may be the only one of its name there.
        """
        if self.path is None:
            return None
        if len(written) > LONGEST_NAME or NO_NAME.search(written):
            return None
        folder = self.path.parent.resolve()
        own_name = OWN_FOLDER.sub("", written)
        path = (folder / own_name).resolve()
        _, _, file = own_name.rpartition("/")
        # its folder is a variable, which may name the script's own
        may_be_guessed = may_guess and "$" in written and SCRIPT.fullmatch(file)
        if may_be_guessed and not path.exists():
            path = self._only_one(folder, file, written) or path
        # a plain name counts from the folder that the script has gone to
        is_elsewhere = self.has_moved and own_name == written
        names_read = (*self.taken_in, self.path.name)
        is_read = path.name in names_read
        if is_elsewhere or is_read or not path.is_relative_to(folder):
            return None
        try:
            text = read_text(path, LARGEST)
        except (OSError, ValueError):
            return None
        return path.name, text

    def _only_one(self, folder: Path, file: str, written: str) -> Path | None:
        """Return the only file of this name in the folder and in those within it; None if there are
        none or several."""
        files = [*folder.glob(file), *folder.glob(f"*/{file}")]
        if len(files) != 1:
            return None
        (only,) = files
        self.guessed[written] = str(only.relative_to(folder))
        return only.resolve()
