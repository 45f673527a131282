"""Which versions this package works with, and what it relies on inside transformers beyond the documented API."""

import sys
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

MINIMUM_PYTHON = (3, 11)
SUPPORTED = {"torch": ">=2.9", "transformers": ">=5.24,<6"}


def check_versions() -> None:
    """Stops the import where Python, torch or transformers is of a version that this package was not made for.

    Raises:
        ImportError: one sentence that says what is needed and what is there.
    """
    needed = f"Python >={'.'.join(map(str, MINIMUM_PYTHON))}, " + " and ".join(
        f"{name} {specifier}" for name, specifier in SUPPORTED.items()
    )
    found = None
    if sys.version_info < MINIMUM_PYTHON:
        found = f"this is Python {sys.version.split()[0]}"
    for name, specifier in SUPPORTED.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            found = f"{name} is not installed"
            continue
        if not SpecifierSet(specifier).contains(installed, prereleases=True):
            found = f"{name} {installed} is installed"
    if found is not None:
        raise ImportError(f"modeling_kimi3 works with {needed}, but {found}.")
