"""The systems' dicts among the named values of a Python, JSON, TOML or YAML file."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tools.foreign.account import Account, Saying
from tools.foreign.systems import BESIDE, LEGACY, LOOSE, MARKS, NXD, TABLES, Spot
from tools.foreign.values import Entry, Table, Thing

DEEPEST = 8
OLD_ZERO = frozenset({"model_config", "optimizer_config", "level", "tensor_placement_policy"})
MASTERS = frozenset({"use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt"})


class Tables:
    """Adds the dicts that systems know by name to an account.

    is_meant: tells if an object counts. read: ids of the objects that were read.
    """

    def __init__(self, account: Account, is_meant: Callable[[Any], bool]) -> None:
        self.account = account
        self.is_meant = is_meant
        self.read: set[int] = set()

    def search(self, table: Table, depth: int = 0) -> None:
        """Add each known dict in `table`, and in dicts within it."""
        if depth > DEEPEST or id(table) in self.read:
            return
        for key, entry in table.entries.items():
            if not isinstance(entry.value, Table):
                continue
            spot = spot_of(str(key), entry.value, table)
            if key == "zero" and OLD_ZERO & {str(name) for name in entry.value.entries}:
                self._refuse_old_zero(entry)
            elif spot is None:
                self.search(entry.value, depth + 1)
            else:
                self.account.take(entry.node)
                self.say(spot, entry.value, str(key), handed_on=depth > 0)
                self._loose(spot[0], table)
        if table.line and MASTERS & {
            str(key) for key in table.entries
        }:  # NxD's, without its telling name
            self.say(NXD, table, "the dict", handed_on=False)

    def _refuse_old_zero(self, entry: Entry) -> None:
        """Refuse `zero = dict(...)` of Colossal-AI before its plugins: it puts the whole model into
        FP16."""
        assert isinstance(entry.value, Table)
        self._strike_within(entry.value)
        self.account.take(entry.node)
        self.account.refuse(
            entry.line,
            "zero = dict(...): Colossal-AI's ZeRO before its plugins, with FP16 weights and "
            "a loss scale of its own, "
            "is not read; say the same with LowLevelZeroPlugin(...) or GeminiPlugin(...)",
        )

    def _loose(self, system: str, table: Table) -> None:
        """Add the single settings of a system that stand beside its dicts."""
        for name, key in LOOSE.get(system, {}).items():
            if (entry := table.entries.get(name)) is not None:
                self.account.add(Saying((system, ""), {key: entry}, entry.line, name, adds=True))

    def say(self, spot: Spot, value: Table, name: str, handed_on: bool) -> None:
        """Add a dict as a saying on `spot`."""
        if not self.is_meant(value) or id(value) in self.read:
            return
        fields = {str(key): _followed(spot, entry) for key, entry in value.entries.items()}
        for i, opened in enumerate(value.open):
            fields[f"**{getattr(opened, 'text', 'dict')}"] = Entry(opened, value.line, -i - 1)
        self._strike_within(value)
        self.account.add(Saying(spot, fields, value.line, name, handed_on=handed_on))

    def _strike_within(self, value: Table) -> None:
        """Strike the names within a dict, which are read with it."""
        self.read.add(id(value))
        for entry in value.entries.values():
            self.account.take(entry.node)
            if isinstance(entry.value, Table) and id(entry.value) not in self.read:
                self._strike_within(entry.value)


def _followed(spot: Spot, entry: Entry) -> Entry:
    """Return the entry without its value if it only states the default, as NxD's documentation
    does."""
    is_default = (
        isinstance(entry.value, Thing)
        and entry.value.text == "optimizer_config['zero_one_enabled']"
    )
    return replace(entry, value=None) if spot == NXD and is_default else entry


def spot_of(name: str, value: Table, beside: Table) -> Spot | None:
    """Return the table that a dict of this name is; None if it is none."""
    keys = {str(key) for key in value.entries}
    if name not in TABLES or (name == "model" and LEGACY & keys):
        return None
    if name == "grad_scaler" and {"mixed_precision", "mp_policy"} & set(beside.entries):
        return ("smp", "grad_scaler")
    marks = MARKS[name] & keys if name in MARKS else keys or {name}
    if name == "model" and marks == {"dtype"} and not _is_torchs(value.entries["dtype"].value):
        return None
    return TABLES[name] if marks or BESIDE.get(name) in beside.entries else None


def _is_torchs(dtype: Any) -> bool:
    """Return False for a text without "torch.", which InternEvo does not take for a dtype."""
    return not isinstance(dtype, str) or dtype.startswith("torch.")
