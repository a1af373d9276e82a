"""Print docs/recipes.md: python -m tests.project.recipes_page > docs/recipes.md."""

import contextlib
import io
import json
import math
import re
import shlex
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from models.parameter_counts import num_parameters
from tools.cli import main
from tools.config.resolved_run import resolve_run
from tools.recipes.recipe import Recipe, read_recipe, recipe_names

HEAD = """\
# Recipes

Run files with published settings, each with the place that these come from, what it needs and what it reaches. Each is a
run file that can be started as it is, once its text and tokenizer are there:

```sh
megaprec init --recipe python-coder -o recipe.toml
```

```console
megaprec init --recipe gpt2-124m -o gpt2.toml
megaprec plan gpt2.toml --gpu A100-40GB
megaprec train gpt2.toml
```

`megaprec init --recipe NAME TEXT` puts a text of your own in place of the recipe's. [Choosing a
layout](choosing-a-layout.md) says how to bring one to other GPUs: `megaprec plan gpt2.toml --gpu H100 --ranks 16 -o
best.toml` writes it in the best layout of 16.

Each is tried with its model made small, for some steps, and planned for its GPUs. **No recipe for GPUs was trained at its
size here:** their numbers are predictions of `megaprec plan`, and what they reach is what the source says. This page is made
from the files: `python -m tests.project.recipes_page > docs/recipes.md`.
"""
SECONDS_A_DAY = 86400


@dataclass(frozen=True)
class Plan:
    """What `megaprec plan` foretells of a recipe. bytes: of the fullest rank. days: of the whole
    run."""

    gpu: str
    ranks: int
    bytes: int
    days: float
    tokens_per_second: float
    verdict: str


@cache
def planned(name: str) -> Plan:
    """Plan a recipe for the GPUs of its note."""
    recipe = read_recipe(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(recipe.content)
        words = shlex.split(recipe.notes["plan"])
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            main(["plan", str(file), *words, "--json"])
        changes = [word for word in words if "=" in word]
        config = resolve_run(file, changes)
    answer: dict[str, Any] = json.loads(output.getvalue())
    prediction = answer["prediction"]
    return Plan(
        gpu=answer["device"],
        ranks=config.world_size,
        bytes=answer["total"],
        days=prediction["seconds"] * config.train.steps / SECONDS_A_DAY,
        tokens_per_second=prediction["tokens_per_s"],
        verdict=answer["verdict"],
    )


def parameters_of(recipe: Recipe) -> int:
    """Return the parameters of a recipe's model; those of a vocabulary that the text decides are of
    the size that is planned."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(recipe.content)
        changes = ["train.init_from=''"] if "init_from" in recipe.content else []
        return num_parameters(resolve_run(file, changes).sized_model)


def rounded(number: float, unit: str = "") -> str:
    """Return a number with two digits and a word for its thousands: 16,300,000 is "16 million"."""
    if number < 1000:
        return f"{number:.2g}{unit}"
    power = min(int(math.log10(number)) // 3, 4)
    word = ["", " thousand", " million", " billion", " trillion"][power]
    digits = number / 1000**power
    return f"{digits:.0f}{word}" if digits >= 10 else f"{digits:.1f}{word}"


def length_of(days: float) -> str:
    """Return a time in days, hours or minutes, with two digits."""
    for size, word in ((1.0, "days"), (1 / 24, "hours"), (1 / 1440, "minutes")):
        if days >= 2 * size:
            return f"{days / size:.2g} {word}"
    return "a minute"


def linked(text: str) -> str:
    """Return a note with links in place of the names of documents and repositories."""
    text = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text)
    text = re.sub(r"github\.com/([\w-]+/[\w.-]+\w)", r"[\1](https://github.com/\1)", text)
    return re.sub(r"arXiv (\d+\.\d+)", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def section(recipe: Recipe) -> list[str]:
    """Return the lines of a recipe: its title, its notes, and what it needs."""
    lines = [
        f"## {recipe.name}",
        "",
        f"{recipe.title}: `megaprec init --recipe {recipe.name}`.",
        "",
    ]
    lines += ["| | |", "|---|---|"]
    if recipe.notes["follows"]:
        lines.append(f"| follows | {linked(recipe.notes['follows'])} |")
    for name in ("differs", "text", "takes"):
        if recipe.notes.get(name, "-") != "-":
            lines.append(f"| {name} | {linked(recipe.notes[name])} |")
    if "plan" in recipe.notes:
        plan = planned(recipe.name)
        needs = (
            f"{plan.ranks} {plan.gpu}, {plan.bytes / 2**30:.0f} GiB on the fullest one; "
            f"{rounded(plan.tokens_per_second)} tokens/s, {length_of(plan.days)} in all (predicted)"
        )
        lines.append(f"| needs | {needs} |")
    for name in ("reaches", "next"):
        if name in recipe.notes:
            lines.append(f"| {name} | {linked(recipe.notes[name])} |")
    return [*lines, ""]


def table(recipes: list[Recipe]) -> list[str]:
    """Return the lines of the table of all recipes."""
    lines = ["| recipe | what | parameters |", "|---|---|---|"]
    for recipe in recipes:
        size = rounded(parameters_of(recipe))
        lines.append(
            f"| [{recipe.name}](#{recipe.name.replace('.', '')}) | {recipe.title} | {size} |"
        )
    return [*lines, ""]


def page() -> str:
    """Return the page: those for a laptop first."""
    recipes = [read_recipe(name) for name in recipe_names()]
    recipes.sort(key=lambda recipe: "plan" in recipe.notes)
    lines = [HEAD, *table(recipes)]
    for recipe in recipes:
        lines += section(recipe)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
