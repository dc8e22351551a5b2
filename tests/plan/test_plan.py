import math
from dataclasses import replace

import pytest
from tests.plan.conftest import MakeSettings

from shoal.errors import ConfigError
from shoal.launch.settings import LaunchConfig
from shoal.plan.broadcast import Links
from shoal.plan.devices import TABLE, Device, Machines
from shoal.plan.plan import Fleet, Plan, make_plan
from shoal.plan.report import describe_plan, export_plan
from shoal.plan.settings import Assumptions, TrainerOptions, change_assumptions, read_settings
from shoal.plan.shapes import ModelShape

SLOW = Device("slow", 100.0, 1e-6, 1000.0)
"""a trainer that takes minutes for the small model, so that everything else fits into its time"""


def build(shape: ModelShape, settings, worker: Device, *, trainer: Device = SLOW, number: int = 1, **prices) -> Plan:  # type: ignore[no-untyped-def]
    fleet = Fleet(
        trainer=Machines(trainer), workers=(Machines(worker, number),), validators=Machines(worker, 2), links=Links()
    )
    return make_plan(shape, settings, fleet, Assumptions(), prices)


def test_the_trainer_decides_the_period_if_all_others_are_faster(
    shape: ModelShape, make_settings: MakeSettings, device: Device
) -> None:
    plan = build(shape, make_settings(), device)
    assert plan.schedule.period_s == plan.step.seconds
    assert plan.schedule.idle == 0 and plan.workers[0].needed == 1 and plan.warnings == ()
    assert plan.sampled_tokens == 32 * 17 and plan.credit == 32 * 17 / 1e6


def test_without_asynchrony_times_add_up(shape: ModelShape, make_settings: MakeSettings, device: Device) -> None:
    times = build(shape, make_settings(async_level=0), device).schedule
    together = times.train_s + times.broadcast_s + max(times.generate_s, times.longest_s) + times.verdict_s
    assert times.period_s == pytest.approx(together)


def test_workers_are_counted_to_fill_the_window(shape: ModelShape, make_settings: MakeSettings, device: Device) -> None:
    weak = replace(device, gbps=device.gbps / 1e7)
    plan = build(shape, make_settings(slots=1), weak)
    worker, window = plan.workers[0], plan.schedule.window_s
    assert worker.needed is not None and worker.needed > 1
    rate = worker.generation.tokens_per_s
    assert (worker.needed - 1) * rate * window < plan.sampled_tokens <= worker.needed * rate * window
    enough = build(shape, make_settings(slots=1), weak, number=worker.needed)
    assert enough.schedule.generate_s <= window < plan.schedule.generate_s
    assert any("of what the trainer can consume" in text for text in plan.warnings)


def test_what_does_not_fit_is_told_in_a_sentence_each(shape: ModelShape, make_settings: MakeSettings) -> None:
    tiny = Device("tiny", 1.7, 1.0, 1000.0)
    large = replace(shape, parameters=10**9, active_parameters=10**9, context=16)
    plan = build(large, make_settings(TrainerOptions(publish="bfloat16")), tiny, trainer=tiny)
    found = "\n".join(plan.warnings)
    assert "the trainer does not fit: 20 GB per rank" in found
    assert "up to 25 tokens, the model's context is 16" in found
    assert "workers with tiny cannot take part: the version takes 2 GB, 64 MB are usable" in found
    assert "validators with tiny do not fit: 4 models (3 of them rivals) take 8 GB" in found
    assert "no worker can generate" in found
    assert all(text.count(". ") == 0 for text in plan.warnings)
    assert math.isinf(plan.schedule.period_s) and export_plan(plan)["period_s"] is None
    assert "never" in describe_plan(plan)


def test_a_slow_broadcast_cannot_be_hidden_by_more_workers(
    shape: ModelShape, make_settings: MakeSettings, device: Device
) -> None:
    fleet = Fleet(
        trainer=Machines(device),
        workers=(Machines(device, 100),),
        validators=Machines(device),
        links=Links(worker_gbps=1e-6),
    )
    plan = make_plan(shape, make_settings(async_level=1), fleet, Assumptions(), {})
    assert plan.workers[0].needed is None
    assert any("at async level 1 no number of workers keeps the trainer busy" in text for text in plan.warnings)


def test_a_device_without_bfloat16_is_named_once(shape: ModelShape, make_settings: MakeSettings) -> None:
    plan = build(shape, make_settings(TrainerOptions(publish="bfloat16")), TABLE["T4"])
    assert [text for text in plan.warnings if "no bfloat16" in text] == [
        "T4 has no bfloat16; its figure is for float16, which shoal does not use"
    ]


def test_a_step_costs_what_all_devices_cost_in_its_time(
    shape: ModelShape, make_settings: MakeSettings, device: Device
) -> None:
    assert build(shape, make_settings(), device, slow=1.0).cost_usd is None
    plan = build(shape, make_settings(), device, slow=36.0, unit=3.6)
    assert plan.cost_usd == pytest.approx((36.0 + 3 * 3.6) * plan.schedule.period_s / 3600)
    with pytest.raises(ConfigError, match="'H100' is not a device of this plan; it has slow, unit"):
        build(shape, make_settings(), device, H100=2.0)


def test_the_text_and_the_figures_say_the_same(shape: ModelShape, make_settings: MakeSettings, device: Device) -> None:
    plan = build(shape, make_settings(), device)
    figures = export_plan(plan)
    assert figures["memory_total_bytes"] == pytest.approx(sum(figures["memory_bytes"].values()), abs=8)
    assert figures["workers"][0]["needed"] == 1 and figures["versions"]["full"]["bytes"] == 4 * shape.parameters
    assert "1 feed the trainer" in describe_plan(plan)


def test_settings_come_from_the_run() -> None:
    config = LaunchConfig.model_validate({"batch": {"groups": 4, "group_size": 8}})
    settings = read_settings(config, prompt_tokens=10, completion_tokens=20, kept=0.5, on_cpu=True)
    assert settings.trainer == TrainerOptions()
    assert (settings.trained_rollouts, settings.sampled_rollouts) == (32, 64)
    assert settings.checked_share == 0.25 and settings.submission_rollouts == 8


def test_options_of_the_trainer_come_from_the_run() -> None:
    learner = {"precision": "bfloat16", "gradient_checkpointing": True, "offload": True}
    config = LaunchConfig.model_validate({"policy": {"publish_dtype": "bfloat16"}, "learner": learner})
    assert read_settings(config, prompt_tokens=10).trainer == TrainerOptions(
        compute="bfloat16",
        offload=True,
        checkpointing=True,
        flex_attention=True,
        publish="bfloat16",
    )
    whole = LaunchConfig.model_validate({"policy": {"dtype": "bfloat16"}, "learner": {"attention": "packed"}})
    assert read_settings(whole, prompt_tokens=10).trainer == TrainerOptions(master="bfloat16", compute="bfloat16")


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ({"prompt_tokens": 0}, "--prompt-tokens"),
        ({"prompt_tokens": 8, "completion_tokens": 65}, "engine.max_tokens = 64"),
        ({"prompt_tokens": 8, "kept": 0.0}, "--kept"),
    ],
)
def test_impossible_lengths_are_refused(lengths: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_settings(LaunchConfig(), **lengths)  # type: ignore[arg-type]


def test_assumptions_are_changed_by_name() -> None:
    assert change_assumptions(["train_utilisation=0.3"]) == Assumptions(train_utilisation=0.3)
    for text in ("speed=1", "train_utilisation", "train_utilisation=fast", "train_utilisation=0"):
        with pytest.raises(ConfigError, match="--assume: "):
            change_assumptions([text])
