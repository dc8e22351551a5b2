"""The streaming builder: the proofs of the whole, however the rows arrive."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.config.run import PolicyConfig, TinyConfig
from shoal.engine.torch import TorchEngine
from shoal.policy.model import load_policy
from shoal.rollout import Request
from shoal.toploc import build
from shoal.toploc.build import ProofBuilder, build_proofs

ALPHABET = "0123456789abcdef"


def draw_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def feed_pieces(builder: ProofBuilder, name: str, hidden: Tensor, pieces: list[int]) -> None:
    start = 0
    for size in pieces:
        piece = hidden[start : start + size]
        builder(name, start, piece)
        start += len(piece)
    if start < len(hidden):
        builder(name, start, hidden[start:])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 150), st.lists(st.integers(0, 70), max_size=10), st.sampled_from([3, 4, 200]))
def test_proofs_do_not_depend_on_how_rows_are_fed(tokens: int, pieces: list[int], width: int) -> None:
    hidden = draw_normal(tokens, width)
    builder = ProofBuilder()
    feed_pieces(builder, "a", hidden, pieces)
    assert builder.take("a") == build_proofs(hidden)


def test_row_by_row_is_a_way_to_feed() -> None:
    hidden = draw_normal(70, 64)
    builder = ProofBuilder()
    feed_pieces(builder, "a", hidden, [1] * 70)
    assert builder.take("a") == build_proofs(hidden)


@pytest.mark.parametrize("waiting", [0, 10_000, 10**9])
def test_rollouts_side_by_side_keep_their_proofs_apart(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "WAITING_BYTES", waiting)
    hiddens = {f"r{i}": draw_normal(5 + 9 * i, 48, seed=i) for i in range(40)}
    builder = ProofBuilder()
    for start in range(0, 400, 32):
        for name, hidden in hiddens.items():
            if start < len(hidden):
                builder(name, start, hidden[start : start + 32])
    assert {name: builder.take(name) for name in hiddens} == {name: build_proofs(h) for name, h in hiddens.items()}


def test_a_rollout_may_be_taken_while_others_go_on() -> None:
    first, second = draw_normal(40, 64, seed=1), draw_normal(90, 64, seed=2)
    builder = ProofBuilder()
    builder("a", 0, first[:32])
    builder("b", 0, second[:50])
    builder("a", 32, first[32:])
    assert builder.take("a") == build_proofs(first)
    builder("b", 50, second[50:])
    assert builder.take("b") == build_proofs(second)


@pytest.mark.parametrize("rows", [32, 16])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_rows_are_copied_when_they_are_fed(kind: torch.dtype, rows: int) -> None:
    buffer = torch.empty(rows, 64, dtype=kind)
    hidden = draw_normal(64, 64).to(kind)
    builder = ProofBuilder()
    for start in range(0, 64, rows):
        buffer.copy_(hidden[start : start + rows])
        builder("a", start, buffer)
    buffer.zero_()
    assert builder.take("a") == build_proofs(hidden)


@pytest.mark.parametrize("start", [0, 31, 33, 64])
def test_a_gap_or_a_repeat_is_the_engines_bug(start: int) -> None:
    builder = ProofBuilder()
    builder("a", 0, draw_normal(32, 8))
    with pytest.raises(AssertionError, match="rows from"):
        builder("a", start, draw_normal(1, 8))


def test_a_taken_rollout_is_forgotten() -> None:
    hidden = draw_normal(33, 64)
    builder = ProofBuilder()
    builder("a", 0, hidden)
    assert len(builder.take("a")) == 2
    assert builder.take("a") == []
    builder("a", 0, hidden[:5])
    assert builder.take("a") == build_proofs(hidden[:5])


def test_many_rollouts_taken_together_get_the_proofs_of_each() -> None:
    hiddens = {f"r{i}": draw_normal(20 + 3 * i, 64, seed=i) for i in range(30)}
    builder = ProofBuilder()
    for name, hidden in hiddens.items():
        builder(name, 0, hidden)
    names = [*reversed(hiddens), "never"]
    assert builder.take_many(names) == [build_proofs(hiddens[name]) for name in names[:-1]] + [[]]
    assert builder.take_many([]) == []
    assert builder.take("r3") == []


def test_a_dropped_rollout_leaves_nothing_to_take() -> None:
    other = draw_normal(33, 64, seed=3)
    builder = ProofBuilder()
    builder("a", 0, draw_normal(40, 64))
    builder("b", 0, other)
    builder.drop("a")
    builder.drop("never")
    assert builder.take("a") == []
    assert builder.take("b") == build_proofs(other)


def test_full_chunks_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting chunks are bounded in bytes; afterwards only indices and patterns are kept."""
    monkeypatch.setattr(build, "WAITING_BYTES", 100_000)
    builder = ProofBuilder()
    for start in range(0, 32 * 50, 32):
        builder("a", start, draw_normal(32, 256))  # 16 kB of patterns each
        assert builder._buffer.nbytes < 100_000
    assert len(builder.take("a")) == 50


def test_a_chunk_that_is_larger_than_what_may_wait_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "WAITING_BYTES", 1000)
    hidden = draw_normal(70, 64)
    builder = ProofBuilder()
    builder("a", 0, hidden)
    assert len(builder._buffer) == 1
    assert builder.take("a") == build_proofs(hidden)


def test_rollouts_of_different_widths_share_a_builder() -> None:
    hiddens = {f"r{i}": draw_normal(70, width, seed=i) for i, width in enumerate((64, 16, 64, 200))}
    builder = ProofBuilder()
    for start in range(0, 70, 20):
        for name, hidden in hiddens.items():
            builder(name, start, hidden[start : start + 20])
    assert {name: builder.take(name) for name in hiddens} == {name: build_proofs(h) for name, h in hiddens.items()}


@pytest.mark.parametrize("first", [True, False])
def test_rows_may_be_fed_inside_and_outside_of_inference_mode(first: bool) -> None:
    hidden = draw_normal(96, 64).requires_grad_()
    builder = ProofBuilder()
    for index in range(3):
        with torch.inference_mode(first == (index % 2 == 0)):
            builder("a", 32 * index, hidden[32 * index : 32 * index + 32])
    assert builder.take("a") == build_proofs(hidden)


def test_other_sizes_than_the_published_are_possible() -> None:
    hidden = draw_normal(40, 64)
    builder = ProofBuilder(topk=512, chunk_size=16)
    builder("a", 0, hidden)
    assert builder.take("a") == build_proofs(hidden, chunk_size=16, topk=512)
    with pytest.raises(ValueError, match="topk"):
        ProofBuilder(topk=0)


def generate(sink: ProofBuilder | None, slots: int, swap: bool = False) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Lengths of rollouts of a tiny engine, and the hidden states that a plain sink recorded next to the builder."""
    policy = load_policy(PolicyConfig(tiny=TinyConfig(width=32, layers=1)), alphabet=ALPHABET, seed=0)
    states: dict[str, list[Tensor]] = {}

    def record(name: str, start: int, hidden: Tensor) -> None:
        assert start == sum(map(len, states.setdefault(name, [])))
        states[name].append(hidden.clone())
        if sink is not None:
            sink(name, start, hidden)

    engine = TorchEngine(policy.model, eos_id=policy.eos_id, slots=slots, sink=record)
    engine.submit(Request(id=f"r{i}", prompt_ids=(3, 4, 5), seed=i, max_tokens=100) for i in range(12))
    lengths: dict[str, int] = {}
    steps = 0
    while engine.busy:
        lengths |= {rollout.id: rollout.num_tokens for rollout in engine.step()}
        steps += 1
        if swap and steps == 10:
            weights = {name: tensor * 1.1 for name, tensor in policy.model.state_dict().items()}
            engine.swap_weights(1, weights)
    return lengths, {name: torch.cat(parts) for name, parts in states.items()}


@pytest.mark.parametrize("swap", [False, True])
def test_an_engine_feeds_it_with_the_states_of_every_token(swap: bool) -> None:
    builder = ProofBuilder()
    lengths, states = generate(builder, slots=5, swap=swap)
    assert len(lengths) == 12
    for name, length in lengths.items():
        assert len(states[name]) == length
        assert builder.take(name) == build_proofs(states[name])


def test_proofs_do_not_depend_on_the_engines_batch() -> None:
    found = []
    for slots in (1, 4, 12):
        builder = ProofBuilder()
        lengths, _ = generate(builder, slots=slots)
        found.append({name: builder.take(name) for name in lengths})
    assert found[0] == found[1] == found[2]


def test_float16_and_bfloat16_rows_are_fed_as_well() -> None:
    hidden = draw_normal(40, 64)
    for kind in (torch.float16, torch.bfloat16):
        builder = ProofBuilder()
        feed_pieces(builder, "a", hidden.to(kind), [7, 7])
        assert builder.take("a") == build_proofs(hidden.to(kind))


def test_strided_rows_are_fed_like_any_others() -> None:
    hidden = draw_normal(40, 64)
    builder = ProofBuilder()
    feed_pieces(builder, "a", hidden.T.contiguous().T, [32])
    assert builder.take("a") == build_proofs(hidden)
