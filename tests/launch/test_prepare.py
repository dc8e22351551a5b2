"""Getting ready: all that is needed, once; what was begun stays as it was begun."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.config.run import load_config
from shoal.coordinator.run import load_service
from shoal.coordinator.run_files import load_run_files
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.launch import prepare
from shoal.launch.layout import SwarmPaths
from shoal.launch.prepare import PreparedSwarm, build_params, log_checks, prepare_swarm
from shoal.launch.run import hold_swarm
from shoal.launch.settings import LaunchConfig
from shoal.recipe import load_recipe
from shoal.shardcast.origin import Origin
from shoal.shardcast.store.store import VersionStore
from shoal.toploc.calibration import load_calibration

Load = Callable[..., LaunchConfig]
CHEAT = 'swarm.cheats=["int8"]'


def test_the_papers_belong_together(prepared: PreparedSwarm) -> None:
    layout = prepared.layout
    recipe = load_recipe(layout.recipe.read_bytes())
    assert recipe.weights == asyncio.run(publish_start(prepared))
    assert recipe.calibration == hashlib.sha256(layout.calibration.read_bytes()).hexdigest()
    assert load_calibration(layout.calibration).model_hash == recipe.model
    service = load_service(layout.service, [], {})
    assert load_run_files(service.recipe, service.calibration, service.params).recipe == layout.recipe.read_bytes()


def test_the_coordinator_gets_what_the_settings_say(prepared: PreparedSwarm) -> None:
    service, config = load_service(prepared.layout.service, [], {}), prepared.config
    params, batch = service.params, config.batch
    assert params == build_params(prepared)
    assert (params.steps, params.async_level, params.group_size) == (3, 0, batch.group_size)
    assert (params.groups_per_batch, params.max_groups) == (batch.groups, int(batch.groups * batch.max_oversample))
    nodes = prepared.identities
    assert params.trainers == (nodes["trainer"].key.public,)
    assert set(params.validators) == {nodes["validator-1"].key.public, nodes["validator-2"].key.public}
    assert service.relays == (prepared.locate("relay-1"),) and service.port == prepared.ports["coordinator"]


def test_every_node_has_an_owner_of_its_own(prepared: PreparedSwarm) -> None:
    owners = {identity.owner for identity in prepared.identities.values()}
    assert len(owners) == len(prepared.identities) == 6
    assert set(prepared.names.values()) == set(prepared.identities)


def test_the_trainer_reads_settings_that_hold_in_every_folder(
    prepared: PreparedSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(prepared.layout.run_settings)
    assert Path(config.out).is_absolute() and config.threads == 1
    assert config.model_copy(update={"out": prepared.config.out}) == prepared.config.core


def test_the_same_again_makes_nothing_anew(prepared: PreparedSwarm, log) -> None:
    def look() -> dict[str, tuple[int, bytes]]:
        paths = [path for path in prepared.layout.root.rglob("*") if path.is_file() and "launch" in path.parts]
        kept = [path for path in paths if path.suffix in (".key", ".safetensors") or "json" in path.name]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in kept}

    before = look()
    log.messages.clear()
    again = prepare_swarm(prepared.config, prepared.layout)
    assert look() == before and log.messages == []
    assert (again.ports, again.names) == (prepared.ports, prepared.names)


def test_by_default_one_line_states_the_guarantee_of_the_checks(prepared: PreparedSwarm, caplog) -> None:
    with caplog.at_level("DEBUG"):
        log_checks(prepared)
    plain = [record.message for record in caplog.records if record.levelname == "INFO"]
    assert len(plain) == 1 and "is caught within" in plain[0]
    assert any(record.message.startswith("power: ") for record in caplog.records)


def test_a_limit_of_operations_makes_less_certain_what_is_found_and_changes_no_threshold(
    prepared: PreparedSwarm, out: Path, load_tiny: Load
) -> None:
    plain = load_calibration(prepared.layout.calibration)
    prepare_swarm(load_tiny(out, CHEAT, "swarm.calibration_tflop=1e-6"), prepared.layout)
    limited = load_calibration(prepared.layout.calibration)
    assert {own.rollouts for own in plain.power} == {16} and {own.rollouts for own in limited.power} == {8}
    found = {own.attack: own.found for own in plain.power}
    assert all(own.found < found[own.attack] for own in limited.power if own.found > 0.5)
    assert (limited.full, limited.short) == (plain.full, plain.short)
    prepare_swarm(load_tiny(out, CHEAT, "swarm.calibration_tflop=1e6"), prepared.layout)
    assert load_calibration(prepared.layout.calibration) == plain


def test_what_a_kill_left_half_done_is_done_again(prepared: PreparedSwarm, log) -> None:
    recipe = prepared.layout.recipe.read_bytes()
    prepared.layout.settings.unlink()  # which is written last
    prepared.layout.calibration.write_text("{")
    prepare_swarm(prepared.config, prepared.layout)
    assert any(text.startswith("measuring how much honest results differ") for text in log.messages)
    assert prepared.layout.recipe.read_bytes() == recipe


def test_until_there_is_a_ledger_settings_may_change(prepared: PreparedSwarm, out: Path, load_tiny: Load) -> None:
    config = load_tiny(out, CHEAT, "engine.max_tokens=7")
    prepare_swarm(config, prepared.layout)
    assert load_recipe(prepared.layout.recipe.read_bytes()).max_tokens == 7


@pytest.mark.parametrize("override", ["steps=4", "engine.max_tokens=7", "swarm.validators=3", "async_level=1"])
def test_a_run_that_was_begun_keeps_what_it_was_begun_with(
    prepared: PreparedSwarm, out: Path, load_tiny: Load, override: str
) -> None:
    _begin(prepared.layout)
    before = prepared.layout.settings.read_bytes()
    with pytest.raises(ConfigError, match=f"started with another value of {override.partition('=')[0]}"):
        prepare_swarm(load_tiny(out, CHEAT, override), prepared.layout)
    assert prepared.layout.settings.read_bytes() == before


def test_workers_may_come_and_go(
    prepared: PreparedSwarm, out: Path, load_tiny: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    _begin(prepared.layout)
    monkeypatch.setattr(prepare, "_write_run_files", None)  # nothing of that kind is needed
    again = prepare_swarm(load_tiny(out, "swarm.workers=3"), prepared.layout)
    assert "worker-3" in again.identities and "cheat-1" not in again.identities
    assert again.identities["worker-1"].owner == prepared.identities["worker-1"].owner


def test_keys_are_their_owners_alone(prepared: PreparedSwarm) -> None:
    keys = list(prepared.layout.root.rglob("*.key"))
    assert len(keys) == 2 + 2 * len(prepared.identities)
    assert all(path.stat().st_mode & 0o077 == 0 for path in keys)


async def publish_start(prepared: PreparedSwarm) -> str | None:
    """The root that an origin gives to v0."""
    key = Key.load(prepared.layout.publisher_key)
    store = await VersionStore.open(prepared.layout.folder("origin"), run=prepared.config.run, publisher=key.public)
    try:
        return (await Origin(store, key).publish(prepared.layout.start, 0)).log.root
    finally:
        await store.close()


def _begin(layout: SwarmPaths) -> None:
    layout.coordinator.mkdir()
    layout.ledger.write_bytes(b"")


def test_a_fresh_start_moves_the_old_one_aside(prepared: PreparedSwarm) -> None:
    root = prepared.layout.root
    with hold_swarm(prepared.layout, fresh=True):
        assert [path.name for path in root.iterdir()] == ["launch"] and not prepared.layout.settings.exists()
        with pytest.raises(ConfigError, match="in use by process"), hold_swarm(prepared.layout, fresh=True):
            pass
    old = SwarmPaths(root.with_name(f"{root.name}.old-1"))
    assert old.settings.exists() and old.recipe.exists()
    with hold_swarm(prepared.layout, fresh=True):  # nothing was made: there is nothing to move
        assert not root.with_name(f"{root.name}.old-2").exists()


def test_a_folder_with_a_run_of_shoal_train_is_left_alone(tmp_path: Path, load_tiny: Load) -> None:
    config = load_tiny(tmp_path)
    layout = SwarmPaths.of(config)
    (layout.root / "checkpoints" / "step-000002").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds a run of `shoal train`; use --fresh"):
        prepare_swarm(config, layout)
    with hold_swarm(layout, fresh=True):
        assert [path.name for path in layout.root.iterdir()] == ["launch"]
    assert (layout.root.with_name("tiny-seed0.old-1") / "checkpoints" / "step-000002").is_dir()
