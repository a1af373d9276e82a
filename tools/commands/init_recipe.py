"""`megaprec init --recipe NAME [TEXT] [-o run.toml]`: write a run file with published settings.

The file is the recipe as it is, its comments too; a TEXT takes the place of its `data.source`, and
comments say so.
"""

import argparse
import re
from glob import has_magic
from pathlib import Path

from megaprec.errors import UserError
from megaprec.parsing import home_expanded
from megaprec.text.readers import TextOptions
from megaprec.tokens.files import write_whole
from megaprec.tokens.places import STANDARD_LIBRARY, is_url
from megaprec.url_secrets import masked
from tools.commands.text_options import text_options
from tools.console.toml import toml
from tools.console.wrapped import say
from tools.recipes.recipe import Recipe, read_recipe, recipe_names

_OF_CHARACTERS = 'tokenizer = "characters"'
_VOCABULARY = re.compile(r"^vocab = \d+\n", re.MULTILINE)
_NOTE_LINE = re.compile(r"^# (text|reaches): ", re.MULTILINE)
_SOURCE = re.compile(r'^source = ".*"$', re.MULTILINE)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a recipe."""
    parser.add_argument(
        "--recipe",
        choices=recipe_names(),
        metavar="NAME",
        help=f"run file with published settings (docs/recipes.md): {', '.join(recipe_names())}",
    )


def write_recipe(args: argparse.Namespace) -> int:
    """Write the run file of a recipe. Raises UserError if other arguments contradict it, or the
    file exists."""
    other_options = text_options(args, skip_bad=args.skip_bad) != TextOptions()
    if args.preset or args.characters or other_options:
        raise UserError.of("command.recipe_alone", recipe=args.recipe)
    recipe = read_recipe(args.recipe)
    content = recipe.content
    if args.source is not None:
        content = _with_source(recipe, args.source)
    write_whole(args.output, content.encode())
    _print_notes(recipe, args.source)
    print(f"written    {args.output}; next: {_next_command(recipe, args.output)}")
    return 0


def _with_source(recipe: Recipe, source: str) -> str:
    """Return the content of a recipe with another text, whose characters are the vocabulary if they
    are the tokens. Comments say what is of the recipe's own text. Raises UserError if the recipe
    has a blend."""
    line = f"source = {toml(source)}"
    content, replaced = _SOURCE.subn(lambda _: line, recipe.content)
    if replaced != 1:
        raise UserError.of("command.recipe_blend", recipe=recipe.name)
    if _OF_CHARACTERS in content:
        content = _VOCABULARY.sub("", content)
    # quoted: the path may have characters that no comment may have
    begins = _beginnings(masked(toml(source)))

    def with_beginning(note_line: re.Match[str]) -> str:
        """Return "# name: " and what is put before the text of this note."""
        (name,) = note_line.groups()
        return f"{note_line[0]}{begins[name]}"

    return _NOTE_LINE.sub(with_beginning, content)


def _beginnings(source: str) -> dict[str, str]:
    """Return what is put before the notes on a recipe's own text, beside another text, `source`."""
    return {
        "text": f"{source}, in place of the recipe's: ",
        "reaches": "with the recipe's own text: ",
    }


def _print_notes(recipe: Recipe, source: str | None) -> None:
    """Print the title of a recipe, and what it needs and reaches with its own text.

    source: another text that is given in place of it, which may not be there yet; None: its own.
    """
    say(f"recipe     {recipe.title}")
    begins: dict[str, str] = {}
    if source is not None:
        is_there = "" if _may_be_there(source) else " (no such file or folder here yet)"
        begins = _beginnings(f"{masked(source)}{is_there}")
    for name in ("text", "takes", "reaches"):
        if name in recipe.notes:
            say(f"{name:<11}{begins.get(name, '')}{recipe.notes[name]}")


def _may_be_there(source: str) -> bool:
    """Return False if a source is a path of this machine where nothing is."""
    if source == STANDARD_LIBRARY or is_url(source) or has_magic(source):
        return True
    return Path(home_expanded(source)).exists()


def _next_command(recipe: Recipe, output: object) -> str:
    """Return the command that follows: a recipe for GPUs is planned before it is started."""
    if "plan" in recipe.notes:
        return f"megaprec plan {output} {recipe.notes['plan']}"
    return f"megaprec train {output}"
