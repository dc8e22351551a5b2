"""Ports: free, one each, kept from start to start unless another process took them."""

import json
import socket
from pathlib import Path

import pytest

from shoal.launch.prepare import HOST, choose_ports

NAMES = ["coordinator", "origin", "relay-1"]


def test_each_has_one_of_its_own_and_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    ports = choose_ports(path, NAMES)
    assert list(ports) == NAMES and len(set(ports.values())) == 3
    assert choose_ports(path, NAMES) == ports == json.loads(path.read_bytes())


def test_one_that_was_taken_is_chosen_anew_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    ports = choose_ports(path, NAMES)
    with socket.create_server((HOST, ports["origin"])):
        again = choose_ports(path, NAMES)
    assert again["origin"] != ports["origin"]
    assert {name: again[name] for name in ("coordinator", "relay-1")} == {
        name: ports[name] for name in ("coordinator", "relay-1")
    }


@pytest.mark.parametrize("content", ["", "[1]", '{"origin": "x"}', '{"origin": 70000}', '{"origin": -1}'])
def test_a_file_that_is_none_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ports.json"
    path.write_text(content)
    assert 0 < choose_ports(path, NAMES)["origin"] < 1 << 16


def test_a_chosen_port_can_be_listened_on_at_once(tmp_path: Path) -> None:
    for port in choose_ports(tmp_path / "ports.json", NAMES).values():
        socket.create_server((HOST, port)).close()
