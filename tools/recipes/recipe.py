"""Recipes: run files with published settings, which say where these come from.

A recipe is a file of this folder. Its first line is its title, and comments of the form `# name:
text` before the first table are its notes; a note goes on in lines that are indented by two more
spaces.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

# follows: whose settings these are, with the place. differs: what is otherwise here. text: what it
#   is trained on, and the folders that must be there. plan: arguments of `megaprec plan` for the
#   GPUs that it is meant for; a recipe for a laptop has `takes` in its place. reaches: the loss or
#   the model, or that it is not known. next: what comes after it.
NOTES = ("follows", "differs", "text", "plan", "takes", "reaches", "next")
_FOLDER = "tools.recipes"
_SUFFIX = ".toml"
_NOTE = re.compile(r"# (\w+): (.*)")
_CONTINUED = re.compile(r"#   (\S.*)")


@dataclass(frozen=True)
class Recipe:
    """One recipe. content: the whole run file. notes: the texts of some of `NOTES`."""

    name: str
    title: str
    notes: Mapping[str, str]
    content: str


def recipe_names() -> list[str]:
    """Return the names of all recipes in alphabetical order."""
    files = resources.files(_FOLDER).iterdir()
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))


def read_recipe(name: str) -> Recipe:
    """Return a recipe by one of `recipe_names()`."""
    file = resources.files(_FOLDER) / f"{name}{_SUFFIX}"
    content = file.read_text(encoding="utf-8")
    head, _, _ = content.partition("\n\n")  # the title and the notes
    title, *lines = head.splitlines()
    notes: dict[str, str] = {}
    current = ""
    for line in lines:
        if match := _NOTE.fullmatch(line):
            current = match[1]
            notes[current] = match[2]
        elif match := _CONTINUED.fullmatch(line):
            notes[current] += f" {match[1]}"
    return Recipe(name, title.removeprefix("# "), MappingProxyType(notes), content)
