"""What a user imports from the package, and what that costs."""

import subprocess
import sys

import pytest

from shoal import shardcast


def test_every_public_name_is_there_and_listed() -> None:
    for name in shardcast.__all__:
        assert getattr(shardcast, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Orign'"):
        _ = shardcast.Orign


def test_importing_the_package_loads_nothing_expensive() -> None:
    code = (
        "import sys, shoal.shardcast; print(sorted({'numpy', 'pyarrow', 'h11', 'torch', 'blake3'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_clients_and_relays_load_neither_torch_nor_pyarrow() -> None:
    code = (
        "import sys; from shoal.shardcast import Relay, ShardcastClient; print({'pyarrow', 'torch'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"
