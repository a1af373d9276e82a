"""Installed packages, and a Python, of other versions than those that megaprec is tested with.

pip keeps the bounds of setup.py beside an installed megaprec, and looks at them only while it
installs. Other versions are there afterwards if a package was changed later, or in an image that
brings its own torch (`pip install --no-deps`). They may work, but what they decide, such as last
bits or what another library computes, has not been tried.
"""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

PYTHONS = SpecifierSet("<3.14,>=3.11")
# those of users
EXTRAS = (
    "",
    "data",
    "hf",
    "lm-eval",
    "mlflow",
    "plots",
    "tensorboard",
    "trackio",
    "wandb",
    "yaml",
)


def untested(*names: str) -> Iterator[str]:
    """Yield, of each package that users need or may have, its version and the tested ones if it is
    not of these.

    names: of some packages; of all, and of Python, if there are none. A checkout that is not
    installed knows no versions of packages.
    """
    python = platform.python_version()
    if not names and not _allows(PYTHONS, python):
        yield f"python {python} is not of the versions that megaprec is tested with: {PYTHONS}"
    for requirement in _requirements():
        if names and requirement.name not in names:
            continue
        installed = installed_version(requirement.name)
        if installed and not _allows(requirement.specifier, installed):
            yield (
                f"{requirement.name} {installed} is not of the versions that megaprec is tested "
                f"with: {requirement.specifier}"
            )


def _requirements() -> Iterator[Requirement]:
    """Yield the requirements of an installed megaprec, but for those of developers' extras."""
    try:
        lines = requires("megaprec") or ()
    except PackageNotFoundError:
        return
    for requirement in map(Requirement, lines):
        # an optional package counts if an extra of users asks for it
        marker = requirement.marker
        if not marker or any(marker.evaluate({"extra": extra}) for extra in EXTRAS):
            yield requirement


def installed_version(name: str) -> str:
    """Return the version of a package: empty if it is not installed."""
    try:
        return version(name) or "of no version"  # what a damaged installation has
    except PackageNotFoundError:
        return ""


def _allows(bounds: SpecifierSet, installed: str) -> bool:
    try:
        return bounds.contains(Version(installed), prereleases=True)
    except InvalidVersion:
        return False
