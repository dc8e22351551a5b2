from dataclasses import replace

import numpy as np
import pytest

from shoal.diloco.aggregate import aggregate_updates, sum_squares
from shoal.diloco.codecs import CODECS, find_codec
from shoal.diloco.outer import UpdateGuard
from shoal.diloco.round import RoundKey, Update

KEY = RoundKey("run", 3, 0, "ab" * 32)
SIZE = 1000


def make_update(peer: str, vector: np.ndarray, tokens: int = 100, codec: str = "fp32") -> Update:
    payload = find_codec(codec).encode(vector.astype(np.float32))
    return Update(KEY, peer, tokens, 10, payload, codec)


def draw_vector(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def average(updates: list[Update], mode: str = "mean", codec: str = "fp32") -> np.ndarray:
    found = aggregate_updates(KEY, updates, SIZE, codec, UpdateGuard.model_validate({"mode": mode}))
    return find_codec(codec).decode(found.payload, SIZE)


def test_the_mean_is_weighted_by_tokens() -> None:
    ones, twos = np.ones(SIZE), np.full(SIZE, 2.0)
    assert average([make_update("a", ones, 300), make_update("b", twos, 100)]).tolist() == [1.25] * SIZE


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("mode", ["mean", "trimmed", "median"])
def test_the_order_of_arrival_does_not_matter(codec: str, mode: str) -> None:
    updates = [make_update(name, draw_vector(i), 100 + i, codec) for i, name in enumerate("abcde")]
    guard = UpdateGuard.model_validate({"mode": mode})
    first = aggregate_updates(KEY, updates, SIZE, codec, guard)
    second = aggregate_updates(KEY, updates[::-1], SIZE, codec, guard)
    assert first.payload == second.payload and first.peers == second.peers == tuple("abcde")


def test_trimming_drops_the_outermost_value_of_each_coordinate() -> None:
    rows = [np.full(SIZE, value) for value in (1.0, 2.0, 3.0, 900.0)]
    updates = [make_update(name, row) for name, row in zip("abcd", rows, strict=True)]
    guard = UpdateGuard(mode="trimmed", clip=1e9)
    found = aggregate_updates(KEY, updates, SIZE, "fp32", guard)
    assert find_codec("fp32").decode(found.payload, SIZE).tolist() == [2.5] * SIZE


def test_three_peers_are_not_trimmed() -> None:
    updates = [make_update(name, draw_vector(i)) for i, name in enumerate("abc")]
    assert (average(updates, "trimmed") == average(updates, "mean")).all()


def test_a_long_vector_is_cut_to_three_medians() -> None:
    updates = [make_update(name, draw_vector(i)) for i, name in enumerate("abc")]
    updates[1] = make_update("b", draw_vector(1) * 1e30)
    found = aggregate_updates(KEY, updates, SIZE, "fp32", UpdateGuard(mode="mean"))
    assert found.clipped == ("b",) and found.peers == ("a", "b", "c")
    mean = find_codec("fp32").decode(found.payload, SIZE)
    assert np.linalg.norm(mean) < 2 * np.linalg.norm(draw_vector(0))


def test_a_lie_about_tokens_weighs_no_more_than_three_medians() -> None:
    updates = [make_update("a", np.zeros(SIZE)), make_update("b", np.zeros(SIZE)), make_update("c", np.zeros(SIZE))]
    updates.append(make_update("liar", np.ones(SIZE), tokens=1 << 40))
    found = aggregate_updates(KEY, updates, SIZE, "fp32", UpdateGuard(mode="mean", clip=3.0))
    # norms of the others are zero, so the liar's vector is cut to nothing
    assert not find_codec("fp32").decode(found.payload, SIZE).any()
    updates[:3] = [make_update(name, np.ones(SIZE)) for name in "abc"]
    updates[3] = make_update("liar", np.full(SIZE, 2.0), tokens=1 << 40)
    assert average(updates) == pytest.approx(np.full(SIZE, (3 * 1 + 3 * 2) / 6))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"payload": np.full(SIZE, np.nan, dtype=np.float32).tobytes()}, "finite"),
        ({"payload": b"\0" * (4 * SIZE - 1)}, "bytes"),
        ({"codec": "fp16"}, "codec"),
        ({"tokens": 0}, "token"),
        ({"tokens": -5}, "token"),
        ({"tokens": 1 << 60}, "token"),
        ({"key": replace(KEY, base="cd" * 32)}, "another"),
        ({"key": replace(KEY, round=2)}, "another"),
        ({"key": replace(KEY, fragment=1)}, "another"),
    ],
)
def test_a_bad_update_is_refused_alone_and_by_name(bad: dict[str, object], reason: str) -> None:
    honest = [make_update(name, draw_vector(i)) for i, name in enumerate("abc")]
    evil = replace(make_update("evil", draw_vector(9)), **bad)  # type: ignore[arg-type]
    found = aggregate_updates(KEY, [evil, *honest], SIZE, "fp32", UpdateGuard())
    assert [refusal.peer for refusal in found.refused] == ["evil"] and reason in found.refused[0].reason
    assert found.peers == ("a", "b", "c")
    assert found.payload == aggregate_updates(KEY, honest, SIZE, "fp32", UpdateGuard()).payload


def test_a_second_update_of_a_peer_does_not_count() -> None:
    once = [make_update(name, draw_vector(i)) for i, name in enumerate("ab")]
    twice = aggregate_updates(KEY, [*once, once[0]], SIZE, "fp32", UpdateGuard())
    assert twice.peers == ("a", "b") and [refusal.peer for refusal in twice.refused] == ["a"]


def test_without_a_usable_update_there_is_no_mean() -> None:
    found = aggregate_updates(KEY, [make_update("a", draw_vector(0), tokens=0)], SIZE, "fp32", UpdateGuard())
    assert found.peers == () and found.payload == b""


@pytest.mark.parametrize("factor", [-1.0, -5.0, 1e6])
def test_one_of_four_cannot_turn_the_mean_around(factor: float) -> None:
    """Honest peers agree in direction, as pseudo-gradients do; a quarter of the peers is against them."""
    common = draw_vector(100)
    updates = [make_update(name, common + 0.5 * draw_vector(i)) for i, name in enumerate("abc")]
    honest = average(updates)
    spoiled = average([*updates, make_update("evil", common * factor)], "trimmed")
    cosine = float(honest @ spoiled / np.linalg.norm(honest) / np.linalg.norm(spoiled))
    assert cosine > 0.85


def test_the_sum_of_squares_is_right() -> None:
    for size in (0, 1, 2, 3, 7, 1000):
        vector = draw_vector(1)[:size]
        assert sum_squares(vector.__getitem__, vector.size) == pytest.approx(
            float((vector.astype(np.float64) ** 2).sum()), rel=1e-12
        )


@pytest.mark.parametrize("codec", ["int4", "int8", "topk"])
def test_a_mean_at_the_limit_of_the_codec_and_what_was_lost_before_are_not_too_much_together(codec: str) -> None:
    """A round must close whatever its peers send."""
    levels = {"int4": 7, "int8": 127, "topk": 1}[codec]
    highest = np.full(SIZE, 65504.0 * levels)
    updates = [make_update(name, highest, codec=codec) for name in "ab"]
    lost = np.full(SIZE, 30000.0, dtype=np.float32)
    found = aggregate_updates(KEY, updates, SIZE, codec, UpdateGuard(), lost)
    assert found.peers == ("a", "b") and find_codec(codec).decode(found.payload, SIZE).max() == 65504.0 * levels
