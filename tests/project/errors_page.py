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

## Exit codes

| code | when |
|---|---|
| 0 | the command did what it was asked for, and what it looked at is as it should be |
| 1 | what it looked at is not so: `parity`, `prove` or `mup-check` found a difference (`parity` also if no layout could be tried), `bisect` found where two runs part, `doctor` or `data verify` found something; or a rank was lost, or megaprec itself failed, with a traceback |
| 2 | bad input, or a file or machine that does not do what the command needs: one line for each problem; nothing was begun, or the run stopped; `prove`, `mup-check`, `bisect` and `doctor`: it could not be tried |
| 3 | a training run ended itself: the loss is lost, or a rank computes wrongly |
| 4 | `plan`: the run does not fit its devices, or with `--ranks` no layout does |
| 128 + n | signal n ended the command; 130 is Ctrl-C, 143 SIGTERM, 141 a reader of the output that has gone |
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
