"""Reading YAML files of unknown origin: plain values only, and no key twice."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.parsing import read_text

MERGE = "tag:yaml.org,2002:merge"
FLOAT = "tag:yaml.org,2002:float"
# What YAML 1.2 and all other languages take for a number, PyYAML takes for text.
EXPONENT_WITHOUT_POINT = re.compile(r"[-+]?\d+[eE][-+]?\d+$")


def read_yaml(file: Path) -> dict[str, Any]:
    """Return a YAML mapping. UserError if the file is not there or holds something else, or if
    nothing here reads YAML."""
    try:
        import yaml  # noqa: PLC0415 (optional)  # pyright: ignore[reportMissingModuleSource]
    except ImportError as problem:
        raise UserError.of("convert.pyyaml_missing", file=file) from problem
    try:
        content = yaml.load(read_text(file), _strict_loader(yaml))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError.of(
            "convert.yaml_unreadable", file=file, split=" ".join(str(error).split())
        ) from error
    if not isinstance(content, dict):
        raise UserError.of("convert.yaml_not_mapping", file=file)
    return content


def _strict_loader(yaml: Any) -> type[Any]:
    """Return a class of loaders of plain values that refuse a key that a mapping has twice.

    yaml: the module PyYAML.
    """
    merging: list[Any] = []  # mappings whose merges are under way, each within the one before

    class StrictLoader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            """Return the node of a table. Raises ValueError if a key is given twice."""
            node = super().compose_mapping_node(anchor)
            seen = set[tuple[str, str]]()
            for key, _ in node.value:  # as they are written: merged ones (<<) may be given again
                identity = key.tag, str(key.value)
                if identity in seen:
                    raise ValueError(
                        f"line {key.start_mark.line + 1}: {key.value} is given twice; keep "
                        "one of them"
                    )
                seen.add(identity)
            return node

        def flatten_mapping(self, node: Any) -> None:
            """Put what a mapping merges (<<) before its own pairs, which count more. Raises
            ValueError for a mapping that merges itself.

            If A merges B, and B merges C, and B and C have the same key, PyYAML 6.0.4 gives A the
            value of C, which that of B should overrule.
            """
            if any(node is other for other in merging):
                raise ValueError(f"line {node.start_mark.line + 1}: a mapping merges itself (<<)")
            merging.append(node)
            merged: list[Any] = []
            own: list[Any] = []
            for key, value in node.value:
                if key.tag != MERGE:
                    own.append((key, value))
                    continue
                for source in _merged_mappings(yaml, value):
                    self.flatten_mapping(source)
                    merged += source.value
            merging.pop()
            # Each key once, with its last value: merges of merges would grow without end.
            last = {(key.tag, str(key.value)): (key, value) for key, value in (*merged, *own)}
            node.value = [*last.values()]
            super().flatten_mapping(node)

    StrictLoader.add_implicit_resolver(FLOAT, EXPONENT_WITHOUT_POINT, [*"-+0123456789"])
    return StrictLoader


def _merged_mappings(yaml: Any, value: Any) -> Iterator[Any]:
    """Yield the mappings that `<<: value` merges, the one that counts most last. Raises ValueError
    for other values."""
    # of a sequence the first mapping counts most
    sources = value.value[::-1] if isinstance(value, yaml.SequenceNode) else [value]
    for source in sources:
        if not isinstance(source, yaml.MappingNode):
            raise ValueError(f"line {source.start_mark.line + 1}: << takes mappings")
        yield source
