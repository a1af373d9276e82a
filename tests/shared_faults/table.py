"""The table of faults and gates: kept beside this file, and shown in CONTRIBUTING.md."""

import json
from collections import Counter
from pathlib import Path

from tests.shared_faults.faults import FAULTS
from tests.shared_faults.gates import GATES, KILLED, NOT_APPLICABLE, SURVIVED

KILLS = Path(__file__).parent / "kills.json"
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
BEGIN = "<!-- faults that all layouts share -->"
END = "<!-- end of the faults -->"
MARKS = {KILLED: "**found**", SURVIVED: "no", NOT_APPLICABLE: "–"}
Kills = dict[str, dict[str, dict[str, str]]]


def read_kills(path: Path) -> Kills:
    """Verdicts by fault and gate; empty if there are none yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_kills(kills: Kills, path: Path) -> None:
    """Write them in the order of the faults and gates."""
    ordered: Kills = {}
    for fault in FAULTS:
        verdicts = kills.get(fault, {})
        ordered[fault] = {gate: verdicts[gate] for gate in GATES if gate in verdicts}
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def gates_that_find(kills: Kills, fault: str) -> list[str]:
    """The gates that find a fault."""
    verdicts = kills.get(fault, {})
    return [gate for gate, verdict in verdicts.items() if verdict["verdict"] == KILLED]


def table(kills: Kills) -> str:
    """The table, in Markdown."""
    lines = [f"| fault | what is wrong | {' | '.join(GATES)} |", "|---" * (2 + len(GATES)) + "|"]
    found = Counter[str]()
    for name, fault in FAULTS.items():
        found.update(gates_that_find(kills, name))
        cells = [name, fault.what]
        for gate in GATES:
            verdict = kills.get(name, {}).get(gate)
            cells.append(MARKS[verdict["verdict"]] if verdict else "not tried")
        lines.append("| " + " | ".join(cells) + " |")
    counts = [f"{found[gate]} of {len(FAULTS)}" for gate in GATES]
    lines.append("| | found | " + " | ".join(counts) + " |")
    return "\n".join(lines)


def write_page(kills: Kills) -> None:
    """Put the table into CONTRIBUTING.md."""
    PAGE.write_text(page_with(table(kills)))


def page_with(text: str) -> str:
    """CONTRIBUTING.md with this table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def shown_table() -> str:
    """The table that CONTRIBUTING.md has."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    return rest.partition(END)[0].strip()
