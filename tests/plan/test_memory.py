from dataclasses import replace

import pytest
from tests.fixtures.benches import load_bench
from tests.plan.conftest import MakeSettings

import shoal.policy.attention as attention
from shoal.learner.logprobs import CHUNK_BYTES
from shoal.plan.memory import SHORT_KEYS, MemoryPlan, count_trained, plan_memory, shape_packs
from shoal.plan.settings import LoraSettings, TrainerOptions
from shoal.plan.shapes import ModelShape

bench = load_bench("plan")
step = load_bench("plan_step")
LONG = {"completion_tokens": 401, "max_tokens": 401, "groups": 1}


def get(plan: MemoryPlan, name: str) -> float:
    return sum(item.bytes for item in plan.items if item.name == name)


def test_packs_are_those_of_the_learner(make_settings: MakeSettings) -> None:
    pack = shape_packs(make_settings(), 1)
    assert (pack.tokens, pack.rows) == (4 * (8 + 8 * 16), 4 * 8 * 17)
    assert (pack.queries, pack.keys) == (4 * (8 + 8 * 16), 4 * (8 + 8 * (16 + 8)))
    assert (pack.pairs, pack.long_queries) == (4 * (8 * 8 + 8 * 16 * 24), 0)
    assert (pack.per_update, pack.per_step) == (1, 1)
    small = shape_packs(make_settings(micro_tokens=150, updates=2), 1)
    assert (small.tokens, small.per_update, small.per_step) == (8 + 8 * 16, 2, 4)
    assert shape_packs(make_settings(micro_tokens=150, updates=2), 2).per_update == 1


def test_the_longest_completion_may_be_the_largest_pack(make_settings: MakeSettings) -> None:
    pack = shape_packs(make_settings(micro_tokens=64, max_tokens=1001), 1)
    assert (pack.tokens, pack.rows) == (8 + 1000, 1001)
    assert (pack.pairs, pack.long_queries, pack.long_keys, pack.longest) == (8 * 8, 1000, 0, 1008)
    two = shape_packs(make_settings(groups=1, group_size=2, completion_tokens=1001, max_tokens=1001), 1)
    assert (two.long_queries, two.long_keys) == (2000, 1008)


def test_scores_are_stored_up_to_as_many_keys_as_attention_does() -> None:
    assert SHORT_KEYS == attention._FUSED


def test_weights_gradients_and_state_by_hand(shape: ModelShape, make_settings: MakeSettings) -> None:
    plan = plan_memory(shape, make_settings(), 1, is_cpu=True)
    assert get(plan, "weights") == 4 * shape.parameters
    assert get(plan, "optimizer") == 8 * shape.parameters
    tokens, keys, pairs = 544, 4 * (8 + 8 * 24), 4 * (64 + 8 * 16 * 24)
    layer = tokens * (16 * 64 + 4 * (64 + 3 * 128)) + 4 * (tokens * 64 + 2 * keys * 32) + 4 * pairs * 4
    assert get(plan, "activations") == 2 * layer
    assert get(plan, "masks") == pairs * (4 + 4 * 4)


def test_shards_divide_what_is_stored_and_add_what_is_gathered(shape: ModelShape, make_settings: MakeSettings) -> None:
    one, four = (plan_memory(shape, make_settings(), ranks) for ranks in (1, 4))
    assert get(four, "weights") == get(one, "weights") / 4
    assert get(four, "optimizer") == get(one, "optimizer") / 4
    assert get(one, "gathered layers") == 0
    units = shape.root_parameters + 2 * shape.layer_parameters
    assert get(four, "gathered layers") == 2 * 4 * units + 4 * shape.layer_parameters


@pytest.mark.parametrize(("master", "per_weight"), [("float32", 8), ("bfloat16", 4)])
def test_the_optimizer_state_has_the_type_of_the_weights(
    master: str, per_weight: float, shape: ModelShape, make_settings: MakeSettings
) -> None:
    options = TrainerOptions(master=master)  # type: ignore[arg-type]
    plan = plan_memory(shape, make_settings(options), 2)
    assert get(plan, "optimizer") == per_weight * shape.parameters / 2


def test_checkpointing_keeps_the_input_of_each_layer_and_one_layer(
    shape: ModelShape, make_settings: MakeSettings
) -> None:
    full = plan_memory(shape, make_settings(**LONG), 1)
    saving = plan_memory(shape, make_settings(TrainerOptions(checkpointing=True), **LONG), 1)
    assert saving.moment == "backward pass of a layer"
    tokens = 8 + 8 * 400
    assert get(saving, "activations") == 2 * 4 * 64 * tokens + get(full, "activations") / 2
    assert get(saving, "weight copies") == get(full, "weight copies") / 2


def test_a_chunk_bounds_the_memory_of_logits(shape: ModelShape, make_settings: MakeSettings) -> None:
    rows, tokens = 4 * 8 * 17, 544
    small, large = (plan_memory(replace(shape, vocabulary=size), make_settings(), 1) for size in (50_000, 500_000))
    assert small.moment == large.moment == "logits"
    assert get(small, "logits") == 5 * 4 * 50_000 * rows + 64 * 4 * (tokens + rows)
    assert get(large, "logits") == 3 * CHUNK_BYTES + 64 * 4 * (tokens + 2 * rows) + 4 * 500_000 * 64


def test_bfloat16_products_halve_activations_but_not_the_master_weights(
    shape: ModelShape, make_settings: MakeSettings
) -> None:
    full = plan_memory(shape, make_settings(), 1)
    mixed = plan_memory(shape, make_settings(TrainerOptions(compute="bfloat16")), 1)
    assert get(mixed, "weights") == get(full, "weights")
    assert get(full, "activations") / 2 < get(mixed, "activations") < get(full, "activations")
    assert get(mixed, "weight copies") == 2 * (2 * shape.layer_parameters + 100 * 64)


def test_adapters_have_little_to_train(shape: ModelShape, make_settings: MakeSettings) -> None:
    options = TrainerOptions(master="bfloat16", compute="bfloat16", lora=LoraSettings(4, ("q_proj", "v_proj")))
    plan = plan_memory(shape, make_settings(options, has_reference=True), 1)
    trained = count_trained(shape, options)
    assert trained == 2 * 4 * (64 + 64 + 64 + 32)
    assert get(plan, "weights") == 2 * shape.parameters + 4 * trained
    assert get(plan, "optimizer") == 8 * trained
    assert get(plan, "reference") == 0  # the base without its adapters


def test_a_reference_is_another_copy_of_the_weights(shape: ModelShape, make_settings: MakeSettings) -> None:
    plan = plan_memory(shape, make_settings(has_reference=True), 2)
    assert get(plan, "reference") == 4 * shape.parameters / 2


def test_ranks_keep_their_own_gradients_only(shape: ModelShape, make_settings: MakeSettings) -> None:
    plan = plan_memory(shape, make_settings(micro_tokens=64), 2)
    assert get(plan, "gradients") == 4 * shape.parameters / 2


def test_offload_moves_what_is_stored_to_the_host(shape: ModelShape, make_settings: MakeSettings) -> None:
    options = TrainerOptions(offload=True)
    plan = plan_memory(shape, make_settings(options, micro_tokens=64), 2)
    assert plan.host_bytes == (4 + 8 + 4) * shape.parameters / 2
    assert not {"weights", "optimizer", "gradients"} & {item.name for item in plan.items}


def test_flex_attention_has_no_masks_and_no_squares(shape: ModelShape, make_settings: MakeSettings) -> None:
    options = TrainerOptions(flex_attention=True)
    short, long = (
        plan_memory(shape, make_settings(options, completion_tokens=n, max_tokens=n, groups=1, micro_tokens=2**20), 1)
        for n in (1001, 2001)
    )
    assert get(long, "masks") == 0
    tokens = [8 + 8 * 1000, 8 + 8 * 2000]
    assert get(long, "activations") / tokens[1] == pytest.approx(get(short, "activations") / tokens[0])


def test_real_training_steps_take_the_memory_that_the_plan_says() -> None:
    cases = (bench.CASES[0], bench.CASES[-1])
    for case, peak_bytes in zip(cases, step.measure_peaks(cases), strict=True):
        assert bench.predict(case).bytes == pytest.approx(peak_bytes, rel=0.2), case.name
