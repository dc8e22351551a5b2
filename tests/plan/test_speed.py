import pytest
from tests.plan.conftest import MakeSettings

from shoal.plan.devices import Device, Machines
from shoal.plan.settings import Assumptions, LoraSettings, TrainerOptions
from shoal.plan.shapes import ModelShape
from shoal.plan.speed import count_forward, count_models, time_generation, time_step, time_validation

ROLLOUTS = 32
PAIRS = ROLLOUTS * (8 * 17 + 17**2 / 2) + 4 * 8**2 / 2
"""of queries and keys: completions see their prompt and themselves, prompts themselves, each once per group"""
TOKENS = 4 * 8 + ROLLOUTS * 17


def test_a_forward_pass_takes_two_flops_per_weight_and_token_and_four_per_pair(
    shape: ModelShape, make_settings: MakeSettings
) -> None:
    expected = 2 * shape.active_parameters * TOKENS + 4 * 2 * 64 * PAIRS
    assert count_forward(shape, make_settings(), ROLLOUTS) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "changes", "passes"),
    [
        (TrainerOptions(), {}, 3.0),
        (TrainerOptions(checkpointing=True), {}, 4.0),
        (TrainerOptions(lora=LoraSettings(4, ("q_proj",))), {}, 2.0),
        (TrainerOptions(), {"updates": 4}, 3.75),
        (TrainerOptions(), {"updates": 4, "recomputes_old": False}, 3.0),
        (TrainerOptions(), {"has_reference": True}, 4.0),
    ],
)
def test_training_is_a_number_of_forward_passes(
    options: TrainerOptions,
    changes: dict[str, int],
    passes: float,
    shape: ModelShape,
    make_settings: MakeSettings,
    device: Device,
) -> None:
    settings = make_settings(options, **changes)
    step = time_step(shape, settings, Machines(device), Assumptions(train_utilisation=0.5))
    assert step.flops == pytest.approx(passes * count_forward(shape, settings, ROLLOUTS))
    assert step.compute_s == pytest.approx(step.flops / 0.5e12)


def test_ranks_share_the_work_and_exchange_parameters(
    shape: ModelShape, make_settings: MakeSettings, device: Device
) -> None:
    one, four = (time_step(shape, make_settings(), Machines(device, 1, n), Assumptions()) for n in (1, 4))
    assert four.compute_s == pytest.approx(one.compute_s / 4)
    assert one.traffic_s == 0
    # One pack per rank: parameters are gathered for the forward and the backward pass, and gradients in float32.
    assert four.traffic_s == pytest.approx(0.75 * (2 * 4 + 4) * shape.parameters / 10e9)
    assert four.seconds == max(four.compute_s, four.traffic_s) + four.optimizer_s
    assert one.optimizer_s == pytest.approx((3 * 4 + 2 * 8) * shape.parameters / 0.6e12)


def test_gradients_are_exchanged_with_every_pack(
    shape: ModelShape, make_settings: MakeSettings, device: Device
) -> None:
    time = time_step(shape, make_settings(micro_tokens=25), Machines(device, 1, 2), Assumptions())
    packs = 16
    assert time.traffic_s == pytest.approx(0.5 * packs * (2 * 4 + 4) * shape.parameters / 10e9)


def test_ranks_on_several_machines_have_the_link_between_machines(
    shape: ModelShape, make_settings: MakeSettings, device: Device
) -> None:
    settings = make_settings(groups=4096)
    near = time_step(shape, settings, Machines(device, 1, 16), Assumptions(node_devices=16))
    far = time_step(shape, settings, Machines(device, 1, 16), Assumptions(node_link_gbps=1))
    assert far.traffic_s == pytest.approx(10 * near.traffic_s)


def test_decoding_reads_weights_and_keys_once_per_token(
    shape: ModelShape, make_settings: MakeSettings, device: Device
) -> None:
    found = time_generation(shape, make_settings(slots=16), Machines(device), Assumptions(decode_bandwidth=0.5))
    read = 4 * shape.active_parameters + 16 * shape.count_kv_bytes(4) * (8 + 17 / 2)
    compute = 2 * shape.active_parameters * 16 / 0.5e12
    token_s = max(read / 0.5e12, compute)
    assert found.rollouts == 16
    assert found.rollout_s == found.longest_s == pytest.approx(17 * token_s)
    prefill_s = 2 * shape.active_parameters * 8 / 8 / 0.5e12
    assert found.tokens_per_s == pytest.approx(17 / (17 * token_s / 16 + prefill_s))


def test_memory_bounds_the_rollouts_side_by_side(shape: ModelShape, make_settings: MakeSettings) -> None:
    kv_bytes = shape.count_kv_bytes(4) * (8 + 17 / 2)
    small = Device("small", (4 * shape.parameters + 3.5 * kv_bytes) / 1e9, 1.0, 1.0)
    exact = Assumptions(usable_memory=1.0, runtime_gb=1e-12)
    assert time_generation(shape, make_settings(), Machines(small), exact).rollouts == 3
    two = time_generation(shape, make_settings(slots=10**6), Machines(small, 1, 2), exact)
    assert two.rollouts > 7  # the weights are there once, on both together
    none = Device("none", 4 * shape.parameters / 1e9, 1.0, 1.0)
    assert time_generation(shape, make_settings(), Machines(none), exact).rollouts == 0


def test_validators_replay_the_checked_share_and_in_bfloat16_with_rivals(
    shape: ModelShape, make_settings: MakeSettings, device: Device
) -> None:
    assumed = Assumptions(prefill_utilisation=0.5)
    plain = time_validation(shape, make_settings(kept=0.5), Machines(device), assumed)
    assert plain == pytest.approx(0.125 * count_forward(shape, make_settings(), 2 * ROLLOUTS) / 0.5e12)
    low = make_settings(TrainerOptions(publish="bfloat16"), kept=0.5)
    assert count_models(low) == 4
    assert time_validation(shape, low, Machines(device), assumed) == pytest.approx(4 * plain)
