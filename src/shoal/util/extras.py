"""Optional packages, which are not installed with shoal itself."""

import importlib
from typing import Any

from shoal.errors import ConfigError


def import_extra(package: str, key: str, extra: str = "", *, hint: str = "") -> Any:
    """Import a package of one of shoal's extras; ConfigError that names the setting that needs it if it is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        name = package.replace("_", "-")
        install = f'in a checkout, pip install -c constraints.txt -e ".[{extra or package}]"'
        raise ConfigError(f"{key}: {name} is not installed; {install}{hint}") from None
