"""docs/migrating.md explains every key that a dialect knows, and none that it does not."""

import re
from types import ModuleType

import pytest

from megaprec.dialects import colossalai, colossalai_plugins, internevo, nemo, nemo_v1, nxd, smp
from megaprec.dialects.reading import Keys
from megaprec.dialects.scaling import TorchGradScaler
from tests.project.test_readme import ROOT

PAGE = (ROOT / "docs" / "migrating.md").read_text()
SECTIONS = {"NxD": nxd, "SMP": smp, "Colossal-AI": colossalai, "InternEvo": internevo, "NeMo": nemo}


PARTS = {colossalai: (colossalai_plugins,), nemo: (nemo_v1,)}


def known(dialect: ModuleType) -> set[str]:
    """All keys of all tables of a dialect."""
    kinds = [
        kind for module in (dialect, *PARTS.get(dialect, ())) for kind in vars(module).values()
    ]
    tables = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Keys)]
    return {key for table in tables for key in table.model_fields}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_a_dialect_is_in_its_table_and_none_is_stale(section: str) -> None:
    text = re.split(rf"^## {section}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]
    cells = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    explained = {
        key for cell in cells if not cell.startswith("**") for key in re.findall(r"`(\w+)`", cell)
    }
    assert explained == known(SECTIONS[section])


def test_the_scaler_that_smp_and_colossalai_share_is_among_their_keys() -> None:
    assert set(TorchGradScaler.model_fields) <= known(smp) & known(colossalai)
