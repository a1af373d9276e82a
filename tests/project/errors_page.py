"""Print docs/errors.md: python -m tests.project.errors_page > docs/errors.md."""

from megaprec.errors import sentences

HEAD = """\
# Errors

Bad input ends a command with exit code 2 and one line for each problem. With `--json` the command also prints one JSON
document on stdout, for scripts that act on an error: its code, its line, and the values that the line names.

```text
{"errors": [{"code": "run.folder_missing", "message": "...", "fields": {"path": "..."}}]}
```

In Python, `UserError.problems` has the lines; each has `code` and `fields`. Codes stay when a line is reworded. A line
without a code, `""`, has none yet. Words in braces are fields.
"""


def page() -> str:
    """Return the page: all sentences by area and name."""
    lines = [HEAD]
    for area, by_name in sorted(sentences().items()):
        lines.append(f"\n## {area}\n\n| code | line |\n|---|---|\n")
        for name, sentence in sorted(by_name.items()):
            cell = sentence.replace("|", "\\|")
            lines.append(f"| `{area}.{name}` | {cell} |\n")
    return "".join(lines)


if __name__ == "__main__":
    print(page(), end="")
