"""One file for a run and its swarm: what is allowed, and that `shoal train` takes the same file."""

from pathlib import Path

import pytest

from shoal.config.help import list_settings
from shoal.config.run import load_config
from shoal.errors import ConfigError
from shoal.launch.settings import DEMO, LaunchConfig, load_launch

ROOT = Path(__file__).parents[2]


def test_the_example_is_what_the_demo_runs() -> None:
    assert (ROOT / "examples" / "demo.toml").read_text() == DEMO.read_text()
    assert load_launch(ROOT / "examples" / "demo.toml") == load_launch(None)


def test_the_demo_has_a_cheat_and_two_validators_to_convict_it() -> None:
    swarm = load_launch(None).swarm
    assert swarm.cheats == ["int8"] and swarm.validators >= 2 and swarm.workers >= 2


def test_shoal_train_takes_the_same_file_and_leaves_the_swarm_aside() -> None:
    path = ROOT / "examples" / "demo.toml"
    assert load_config(path) == load_launch(path).core
    with pytest.raises(ConfigError, match=r"^swarm: unknown key"):
        load_config(path, ["swarm.workers=3"])


def test_the_trainer_has_as_many_threads_as_all_others_unless_it_is_told() -> None:
    assert load_launch(None, ["threads=0", "swarm.threads=3"]).core.threads == 3
    assert load_launch(None, ["threads=2", "swarm.threads=3"]).core.threads == 2


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("swarm.worker=3", "swarm.worker: unknown key; did you mean swarm.workers"),
        ("swarm.cheats=int8", "swarm.cheats: must be a list of attacks"),
        ("swarm.validators=0", "swarm.validators: must be at least 1"),
        ("steps=0", "steps: a swarm trains at least 1 step"),
        ("engine.name=vllm", 'engine.name: a swarm samples with "torch"'),
        (f"beacon={'a' * 64}", "beacon: the coordinator of a swarm"),
    ],
)
def test_a_mistake_is_a_sentence(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_launch(None, [override])
    assert str(caught.value).startswith(sentence)


def test_somebody_has_to_work() -> None:
    with pytest.raises(ConfigError, match="no workers and no cheats"):
        load_launch(None, ["swarm.workers=0", "swarm.cheats=[]"])


def test_the_name_in_the_ledger_is_one_that_a_ledger_takes() -> None:
    from shoal.util.units import check_run

    assert load_launch(None, ["name=Demo_2.b", "seed=3"]).run == "demo-2-b-seed3"
    check_run(load_launch(None, [f"name={'x' * 64}"]).run)


def test_every_setting_says_what_it_is() -> None:
    own = [setting for setting in list_settings(LaunchConfig) if setting.key.startswith("swarm.")]
    assert len(own) > 8 and all(setting.text and setting.allowed for setting in own)
