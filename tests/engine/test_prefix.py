"""Prompts: their keys and values are those of the model, with the same bits in any batch."""

import pytest
import torch

from shoal.config.run import PolicyConfig, TinyConfig
from shoal.engine.batch_invariance import RowCounts, measure_rows
from shoal.engine.prefix import compute_prefixes
from shoal.policy.decoder import fuse_layers
from shoal.policy.model import Policy, load_policy


def make_prefix(length: int) -> tuple[int, ...]:
    return tuple(3 + (index * index + length) % 20 for index in range(length))


@torch.no_grad()
def test_keys_and_values_are_those_of_transformers(qwen: Policy) -> None:
    prefixes = [make_prefix(length) for length in (1, 8, 9, 40)]
    found = compute_prefixes(qwen.model, None, [*prefixes, ()], RowCounts((16, 64, 256)))
    assert set(found) == set(prefixes)
    for prefix in prefixes:
        cache = qwen.model(input_ids=torch.tensor([prefix]), use_cache=True).past_key_values
        for layer, kept in enumerate(found[prefix]):
            torch.testing.assert_close(kept[0], cache.layers[layer].keys[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(kept[1], cache.layers[layer].values[0], atol=1e-5, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 3])
def test_company_leaves_every_bit_as_it_was(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    tiny = TinyConfig(arch="llama", layers=2, width=64, heads=2, kv_heads=1)
    model = load_policy(PolicyConfig(tiny=tiny), alphabet="0123456789abcdefghij", seed=1).model
    layers = fuse_layers(model)
    counts = measure_rows(model, layers, slots=1)
    prefixes = [make_prefix(length) for length in (128, 127, 126, 64, 63, 300, 5, 4)]
    together = compute_prefixes(model, layers, prefixes, counts)
    alone = {prefix: compute_prefixes(model, layers, [prefix], counts)[prefix] for prefix in prefixes}
    torch.set_num_threads(before)
    assert all(torch.equal(together[prefix], alone[prefix]) for prefix in prefixes)


@torch.inference_mode()
def test_row_counts_stay_within_the_range_unless_one_prefix_is_longer(make_model) -> None:
    model = make_model("gpt_neox")
    rows: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].numel()))
    compute_prefixes(model, None, [make_prefix(n) for n in (20, 30, 40, 100, 1, 70, 3)], RowCounts((32, 48, 64)))
    assert rows == [64, 48, 112, 32, 80, 32]  # 20 + 30, 40, 100, 1, 70, 3
