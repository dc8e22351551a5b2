"""A swarm on several machines: what is typed where, and which secrets are not on the way."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli import build_parser
from shoal.coordinator.run import load_service
from shoal.coordinator.run_files import load_run_files
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.launch import prepare
from shoal.launch.deploy import describe_hosts, list_hosts
from shoal.launch.layout import SwarmPaths
from shoal.launch.prepare import PreparedSwarm, prepare_swarm
from shoal.launch.run import start_swarm
from shoal.launch.settings import LaunchConfig, load_launch

Load = Callable[..., LaunchConfig]
OPERATOR, VALIDATOR = Key.generate().public, Key.generate().public
HOSTS = {
    "coordinator": "http://run.example.org:8700",
    "origin": "http://trainer.example.org:8600",
    "relays": '["http://a.example.org:8601", "http://b.example.org"]',
    "validators": f'["{VALIDATOR}"]',
    "operator": OPERATOR,
}


def name_hosts(**changes: str) -> list[str]:
    return [f"swarm.hosts.{name}={value}" for name, value in (HOSTS | changes).items()]


@pytest.fixture
def spread(out: Path, load_tiny: Load, monkeypatch: pytest.MonkeyPatch) -> PreparedSwarm:
    """The tiny swarm, ready for several machines."""
    monkeypatch.setattr(prepare, "_write_run_files", None)  # they are there, and hold for any machines
    config = load_tiny(out, 'swarm.cheats=["int8"]', *name_hosts())
    layout = SwarmPaths.of(config)
    layout.operator_key.unlink()
    return prepare_swarm(config, layout)


def test_every_command_exists_and_serves_at_the_port_of_its_address(spread: PreparedSwarm) -> None:
    parser = build_parser()
    listening = {}
    for station in list_hosts(spread):
        for arguments in station.commands:
            args = parser.parse_args(arguments)
            assert callable(args.command)
            if hasattr(args, "listen"):
                listening[station.name] = args.listen
    assert listening == {
        "coordinator (run.example.org)": "0.0.0.0:8700",
        "trainer (trainer.example.org)": "0.0.0.0:8600",
        "relay (a.example.org)": "0.0.0.0:8601",
        "relay (b.example.org)": "0.0.0.0:80",
    }


def test_servers_by_https_are_given_their_certificates(spread: PreparedSwarm) -> None:
    addresses = {"coordinator": "https://run.example.org", "origin": "https://trainer.example.org:8600"}
    hosts = spread.config.swarm.hosts.model_copy(update={**addresses, "relays": ["https://a.example.org"]})
    swarm = spread.config.swarm.model_copy(update={"hosts": hosts})
    spread.config = spread.config.model_copy(update={"swarm": swarm})
    coordinator, trainer, relay = list_hosts(spread)[:3]
    for command, port in ((coordinator.commands[0], 443), (trainer.commands[0], 8600), (relay.commands[0], 443)):
        assert f"0.0.0.0:{port}" in command
        assert command[-4:] == ("--tls-cert", "fullchain.pem", "--tls-key", "key.pem")
    assert relay.commands[0][:2] == ("relay", "https://trainer.example.org:8600")


def test_commands_that_connect_trust_the_certificate_of_the_settings(
    spread: PreparedSwarm, out: Path, load_tiny: Load
) -> None:
    https = {"coordinator": "https://run.example.org:8443", "origin": "https://trainer.example.org:8600"}
    https["relays"] = '["https://a.example.org:8601"]'
    config = load_tiny(out, 'swarm.cheats=["int8"]', *name_hosts(**https, ca="cert.pem"))
    coordinator, trainer, relay, validator, worker = list_hosts(prepare_swarm(config, spread.layout))
    trusting = [*coordinator.commands, *trainer.commands, *relay.commands, *validator.commands, *worker.commands]
    names = [command[0] for command in trusting if "--ca cert.pem" in " ".join(command)]
    assert names == ["trainer", "relay", "validator", "worker"], "these connect to others"
    assert (relay.about, worker.about) == ("cert.pem, fullchain.pem, key.pem", "cert.pem")
    assert load_service(spread.layout.bundle / "coordinator.toml", [], {}).ca == "cert.pem"


def test_a_coordinator_behind_a_proxy_needs_no_certificate(spread: PreparedSwarm, out: Path, load_tiny: Load) -> None:
    https = {"coordinator": "https://run.example.org", "behind_proxy": "true"}
    config = load_tiny(out, 'swarm.cheats=["int8"]', *name_hosts(**https))
    coordinator, _, relay, *_ = list_hosts(prepare_swarm(config, spread.layout))
    assert coordinator.commands == (("coordinator", "coordinator.toml", "--data", "data"),)
    service = load_service(spread.layout.bundle / "coordinator.toml", [], {})
    assert service.http.behind_proxy and service.host == "127.0.0.1"
    assert relay.about == "no files needed"


def test_a_relay_of_an_origin_without_tls_needs_no_certificate(
    spread: PreparedSwarm, out: Path, load_tiny: Load
) -> None:
    config = load_tiny(out, 'swarm.cheats=["int8"]', *name_hosts(coordinator="https://run.example.org", ca="cert.pem"))
    _, _, relay, *_ = list_hosts(prepare_swarm(config, spread.layout))
    assert relay.about == "no files needed" and "--ca" not in relay.commands[0]


def test_the_commands_are_lines_for_a_shell(spread: PreparedSwarm) -> None:
    text = describe_hosts(spread)
    assert "\nshoal relay http://trainer.example.org:8600 \\\n    --publisher " in text
    lines = text.replace("\\\n", "").splitlines()
    commands = [shlex.split(line) for line in lines if not line.startswith("# ")]
    assert [tuple(words) for words in commands] == [
        ("shoal", *arguments) for station in list_hosts(spread) for arguments in station.commands
    ]


def test_the_coordinator_gets_all_it_needs_and_no_secret(
    spread: PreparedSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = spread.layout.bundle
    assert {path.name for path in bundle.iterdir()} == {"coordinator.toml", "recipe.json", "calibration.json"}
    monkeypatch.chdir(bundle)
    service = load_service(Path("coordinator.toml"), [], {})
    assert service.urls == (HOSTS["coordinator"],) and service.host == "127.0.0.1"
    assert service.relays == ("http://a.example.org:8601", "http://b.example.org")
    assert (service.operator, service.params.validators) == (OPERATOR, (VALIDATOR,))
    assert service.params.trainers == (spread.identities["trainer"].key.public,)
    assert (
        load_run_files(service.recipe, service.calibration, service.params).recipe == spread.layout.recipe.read_bytes()
    )


def test_no_key_is_made_for_those_who_make_their_own(spread: PreparedSwarm) -> None:
    assert set(spread.identities) == {"trainer"}
    assert [path.name for path in spread.layout.launch.glob("*.key")] == ["publisher.key"]


def test_an_operator_who_is_not_named_gets_a_key(spread: PreparedSwarm, out: Path, load_tiny: Load) -> None:
    config = load_tiny(out, 'swarm.cheats=["int8"]', *name_hosts(operator=""))
    again = prepare_swarm(config, spread.layout)
    assert again.operator == Key.load(spread.layout.operator_key).public


def test_a_part_may_move(spread: PreparedSwarm, out: Path, load_tiny: Load) -> None:
    (spread.layout.root / "versions").mkdir()  # the run was begun, though its ledger is elsewhere
    moved = load_tiny(out, 'swarm.cheats=["int8"]', *name_hosts(relays='["http://c.example.org:8600"]'))
    prepare_swarm(moved, spread.layout)
    assert "c.example.org" in (spread.layout.bundle / "coordinator.toml").read_text()
    changed = load_tiny(out, 'swarm.cheats=["int8"]', "engine.max_tokens=7", *name_hosts())
    with pytest.raises(ConfigError, match=r"started with another value of engine\.max_tokens"):
        prepare_swarm(changed, spread.layout)


def test_a_swarm_on_several_machines_is_not_run_on_one(out: Path, load_tiny: Load) -> None:
    with pytest.raises(ConfigError, match="prints what to type where"):
        start_swarm(load_tiny(out, *name_hosts()))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("coordinator", "", "coordinator: missing"),
        ("coordinator", "run.example.org", "use https://HOST or http://HOST:PORT"),
        ("coordinator", "http://run.example.org/x", "invalid address"),
        ("origin", "", "origin: missing"),
        ("origin", "trainer.example.org:8600", "invalid address"),
        ("origin", "http://run.example.org:8700", "each needs a port of its own"),
        ("relays", "[]", "relays: missing"),
        ("relays", '["ftp://a.example.org"]', "invalid address"),
        ("validators", "[]", "validators: missing"),
        ("validators", '["abc"]', "not a public key"),
        ("operator", "abc", "not a public key"),
    ],
)
def test_missing_and_invalid_hosts_are_named(name: str, value: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_launch(None, name_hosts(**{name: value}))


def test_strangers_may_do_all_the_work() -> None:
    assert load_launch(None, [*name_hosts(), "swarm.workers=0", "swarm.cheats=[]"]).swarm.is_spread
