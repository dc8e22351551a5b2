from pathlib import Path

import pytest

from shoal.config.help import FOREIGN_NAMES, describe_settings, list_settings
from shoal.config.run import RunConfig, build_config, config_hash, flatten_config, load_config
from shoal.config.toml import read_toml
from shoal.diloco.settings import DilocoConfig
from shoal.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


def refuse(*overrides: str) -> str:
    """The sentence with which these overrides are refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def refuse_file(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads(path: Path) -> None:
    if path.stem == "diloco":
        build_config(DilocoConfig, read_toml(path), ())
    else:
        load_config(path)


def test_without_file_and_overrides_the_defaults_hold() -> None:
    assert load_config(None) == RunConfig()


def test_overrides_are_laid_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("seed = 3\n[learner]\nlr = 0.5\nupdates = 7\n")
    config = load_config(path, ["learner.lr=1e-4"])
    assert (config.seed, config.learner.lr, config.learner.updates) == (3, 1e-4, 7)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("tasks.name=sort", "tasks.name", "sort"),
        ('tasks.name="sort"', "tasks.name", "sort"),
        ("tasks.name = sort", "tasks.name", "sort"),
        ("learner.lr=1e-4", "learner.lr", 1e-4),
        ("learner.lr=1", "learner.lr", 1.0),
        ("batch.filter=false", "batch.filter", False),
        ("tasks.options.length=6", "tasks.options.length", 6),
        ("tasks.options.kind=easy", "tasks.options.kind", "easy"),
        ("tasks.options.day=2024-01-01", "tasks.options.day", "2024-01-01"),
        ("learner.loss.name=grpo", "learner.loss.name", "grpo"),
        ("name=5", "name", "5"),
        ("name=true", "name", "true"),
        ("policy.path=", "policy.path", ""),
        ("policy.path=a=b", "policy.path", "a=b"),
        ("policy.path=[x", "policy.path", "[x"),
        ("steps=1_000", "steps", 1000),
    ],
)
def test_an_override_reads_its_value_by_the_type_of_its_key(override: str, key: str, value: object) -> None:
    found = flatten_config(load_config(None, [override]))[key]
    assert found == value
    assert type(found) is type(value)


def test_the_last_of_two_overrides_wins() -> None:
    assert load_config(None, ["seed=1", "seed=2"]).seed == 2


def test_a_line_break_in_a_value_sets_no_second_key() -> None:
    config = load_config(None, ["policy.path=1\nseed = 5"])
    assert (config.policy.path, config.seed) == ("1\nseed = 5", 0)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("learner.lr=-3", "learner.lr: must be greater than 0 and at most 1, got -3"),
        ("learner.lr=fast", 'learner.lr: must be a number greater than 0 and at most 1, got "fast"'),
        ("learner.lr=nan", "learner.lr: must be a number greater than 0 and at most 1, got nan"),
        ("learner.loss.delta=inf", "learner.loss.delta: must be a number greater than 1, got inf"),
        ("learner.lr.x=1", "learner.lr: must be a number greater than 0 and at most 1, got a table"),
        ("steps=true", "steps: must be an integer at least 0, got true"),
        ("steps=2.0", "steps: must be an integer at least 0, got 2.0"),
        ("seed=99999999999999999999", "seed: must be at least 0 and less than 2^63, got 99999999999999999999"),
        ("batch.filter=yes", 'batch.filter: must be true or false, got "yes"'),
        (
            "learner.loss.name=ppo",
            'learner.loss.name: must be one of intellect2, grpo, dr_grpo, dapo, gspo, cispo, got "ppo"',
        ),
        (
            "policy.tiny.width=17",
            "policy.tiny.width: must be at least 16 and at most 4096 and a multiple of 16, got 17",
        ),
        ("policy.tiny.heads=3", "policy.tiny: width 128 must be a multiple of heads 3"),
        ("checkpoint=5", "checkpoint: must be a table with the keys every, keep, got 5"),
        ("tasks.options.a.b=1", "tasks.options.a: must be true or false, a number or a string, got a table"),
        (
            "tasks.options=3",
            "tasks.options: must be a table of values, each true or false, a number or a string, got 3",
        ),
        ("learner.lr", "learner.lr: expected key=value, for example learner.lr=1e-4"),
        ("=1", "=1: expected key=value, for example learner.lr=1e-4"),
        ("learner..lr=1", "learner..lr=1: expected key=value, for example learner.lr=1e-4"),
        ("policy.path=\udcff", "policy.path: key and value must be UTF-8 text"),
    ],
)
def test_a_wrong_override_is_refused_in_one_sentence(override: str, sentence: str) -> None:
    assert refuse(override) == sentence


@pytest.mark.parametrize("name", ["", "a/b", "..", "-a", "a b", "a\n", "x" * 65])
def test_a_run_name_that_is_no_safe_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        RunConfig(name=name)


def test_a_misspelled_key_is_answered_with_its_neighbour() -> None:
    assert refuse("learner.lrr=1") == "learner.lrr: unknown key; did you mean learner.lr?"


def test_a_key_without_its_table_is_answered_with_the_full_keys() -> None:
    assert "did you mean sft.lr or learner.lr?" in refuse("lr=1")


def test_a_key_like_no_other_is_answered_with_the_known_keys_alone() -> None:
    assert refuse("zebra=1").startswith("zebra: unknown key; known keys: name, out, seed, ")


def test_of_several_errors_each_has_a_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["learner.lr=-3", "eval.tasks=0", "loss_type=grpo", "epsilon=0.2"])
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["learner.lr", "eval.tasks", "loss_type", "epsilon"]
    assert lines[2].endswith("did you mean learner.loss.name?")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("num_train_epochs=1", "did you mean steps? (training is counted in steps of batch.groups tasks, not in"),
        ("use_vllm=true", "use_vllm: unknown key; not needed"),
        ("logging_steps=1", "logging_steps: unknown key; not needed"),
        ("per_device_train_batch_size=8", "batch.groups? (prompts per step; completions = groups x batch.group_size)"),
        ("gradient_accumulation_steps=8", "learner.micro_tokens? (not one-to-one"),
        ("bf16=true", "did you mean learner.precision?"),
        ("gradient_checkpointing=true", "did you mean learner.gradient_checkpointing?"),
        ("model=x", "did you mean policy.path?"),
        ("warmup_ratio=0.1", "did you mean learner.warmup_steps? (a number of optimizer steps, not a share)"),
        ("resume_from_checkpoint=true", "unknown key; not needed; the same command resumes"),
        ("learner.max_grad_nrm=1", "did you mean learner.max_grad_norm?"),
    ],
)
def test_a_name_of_another_framework_is_answered_with_what_is_here(override: str, hint: str) -> None:
    assert hint in refuse(override)


def test_centered_is_centred() -> None:
    assert load_config(None, ["learner.advantage=centered"]).learner.advantage == "centred"


def test_one_place_of_tasks_needs_no_list() -> None:
    assert load_config(None, ["tasks.set=roman.jsonl"]).tasks.set == ["roman.jsonl"]
    assert "must be a place or a list of places" in refuse("tasks.set=5")


def test_a_long_wrong_value_is_cut() -> None:
    assert len(refuse("learner.lr=" + "x" * 10_000)) < 200


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such file"):
        load_config(tmp_path / "none.toml")


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory, expected a TOML file"):
        load_config(tmp_path)


def test_broken_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    sentence = refuse_file(tmp_path / "a.toml", b"seed = 1\nname == 3\n")
    assert sentence.startswith("not valid TOML: ")
    assert "line 2" in sentence


def test_toml_that_breaks_off_is_refused_with_its_last_line(tmp_path: Path) -> None:
    assert "line 2, the end of the file" in refuse_file(tmp_path / "a.toml", b"seed = 1\nname = [")


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    assert refuse_file(tmp_path / "a.toml", b'name = "\xff"') == "not UTF-8 text (byte 8)"


def test_toml_nested_beyond_reason_is_refused(tmp_path: Path) -> None:
    assert refuse_file(tmp_path / "a.toml", b"a = " + b"[" * 100_000).startswith("not valid TOML: ")


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfseed = 4\r\n")
    assert load_config(tmp_path / "a.toml").seed == 4


def test_the_hash_changes_with_any_value_and_with_nothing_else() -> None:
    config = RunConfig()
    assert config_hash(config) == config_hash(RunConfig())
    assert config_hash(config) != config_hash(load_config(None, ["learner.loss.kl=0.001"]))


def test_the_hash_of_parts_depends_on_these_parts_alone() -> None:
    config, other = RunConfig(), load_config(None, ["learner.lr=0.01"])
    assert config_hash(config, "seed", "policy", "tasks.options") == config_hash(
        other, "seed", "policy", "tasks.options"
    )
    assert config_hash(config, "learner.lr") != config_hash(other, "learner.lr")


def test_every_setting_has_an_explanation() -> None:
    assert [setting.key for setting in list_settings(RunConfig) if not setting.text] == []


def test_the_table_of_settings_holds_every_key_and_keeps_its_width() -> None:
    table = describe_settings(list_settings(RunConfig), 100)
    assert all(f"\n{setting.key} " in table for setting in list_settings(RunConfig))
    assert max(map(len, table.splitlines())) <= 100


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("max_steps", "steps"),
        ("learning_rate", "learner.lr"),
        ("beta", "learner.loss.kl"),
        ("num_generations", "batch.group_size"),
        ("max_completion_length", "engine.max_tokens"),
        ("model_name_or_path", "policy.path"),
        ("save_steps", "checkpoint.every"),
        ("report_to", "track.name"),
        ("clip_ratio_high", "learner.loss.eps_high"),
        ("max_async_level", "async_level"),
        ("learner.learning_rate", "learner.lr"),
    ],
)
def test_names_of_other_frameworks_are_known(key: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key; did you mean {ours}\\?"):
        load_config(None, [f"{key}=1"])


def test_every_name_of_another_framework_leads_to_a_setting() -> None:
    keys = {setting.key for setting in list_settings(RunConfig)}
    assert set(FOREIGN_NAMES.values()) <= keys
    assert not set(FOREIGN_NAMES) & keys
