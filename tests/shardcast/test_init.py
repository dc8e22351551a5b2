"""What a user imports from the package, and what that costs."""

import subprocess
import sys

import pytest

from shoal import shardcast


def test_every_public_name_is_there_and_listed() -> None:
    for name in shardcast.__all__:
        assert getattr(shardcast, name).__name__ == name
    assert sorted(shardcast.__all__) == sorted(name for names in shardcast._HOMES.values() for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'Orign'"):
        _ = shardcast.Orign


def test_a_look_at_the_package_loads_nothing_dear() -> None:
    code = (
        "import sys, shoal.shardcast; print(sorted({'numpy', 'pyarrow', 'h11', 'torch', 'blake3'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_clients_and_relays_load_neither_torch_nor_pyarrow() -> None:
    code = "import sys; from shoal.shardcast import Client, Relay; print({'pyarrow', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"
