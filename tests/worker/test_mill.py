"""The mill: orders in, work out; one version for each lease, nothing lost, nothing mixed up."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import pytest

from shoal.engine.torch import TorchEngine
from shoal.errors import ConfigError
from shoal.group import encode_task, generate_groups
from shoal.policy.model import open_policy
from shoal.recipe import Recipe
from shoal.rollout import Score
from shoal.tasks.base import Family, Task
from shoal.tasks.sets import SetFamily, SetFilter, open_set
from shoal.tasks.verify.base import FAULT, own_fault
from shoal.worker.author import Author, Work, bound_prompts, fit_slots
from shoal.worker.intake import Order, WorkLimits, take_order
from shoal.worker.mill import Mill

LIMITS = WorkLimits()
PATIENCE_S = 60.0


@contextmanager
def turning(author: Author, slots: int = 16) -> Iterator[tuple[Mill, "Queue[Work]"]]:
    """A mill in its thread, stopped at the end of the block."""
    done: Queue[Work] = Queue()
    mill = Mill(author, done.put, limits=LIMITS, slots=slots)
    thread = threading.Thread(target=mill.run)
    thread.start()
    try:
        yield mill, done
    finally:
        mill.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture
def order_of(recipe: Recipe, make_lease):
    def make(name: str, **changes: object) -> Order:
        return take_order(make_lease(name, **changes), recipe, LIMITS)

    return make


def expect(recipe: Recipe, order: Order, version: int, folder: Path):
    """The groups of an order, generated alone."""
    author, policy = Author(recipe), open_policy(folder)
    engine = TorchEngine(policy.model, eos_id=policy.eos_id, slots=3, version=version)
    return tuple(generate_groups(engine, author.family, policy.tokenizer, author.plan(order, policy.tokenizer)))


def same(left, right) -> bool:
    pairs = zip(left, right, strict=True)
    return all(
        (a.index, a.task_id, a.scores) == (b.index, b.task_id, b.scores)
        and all(
            (x.id, x.token_ids.tolist(), x.logprobs.tobytes(), x.versions)
            == (y.id, y.token_ids.tolist(), y.logprobs.tobytes(), y.versions)
            for x, y in zip(a.rollouts, b.rollouts, strict=True)
        )
        for a, b in pairs
    )


@pytest.mark.parametrize("slots", [1, 5, 64])
def test_leases_side_by_side_are_each_as_if_alone(recipe: Recipe, versions, order_of, slots: int) -> None:
    # the same indices of two steps: their rollouts have the same names
    orders = [order_of("l1"), order_of("l2", step=2), order_of("l3", first=2, count=1)]
    with turning(Author(recipe), slots) as (mill, done):
        for order in orders:
            mill.order(order)
        mill.offer(0, versions[0])
        works = {work.order.lease: work for work in (done.get(timeout=PATIENCE_S) for _ in orders)}
    for order in orders:
        work = works[order.lease]
        assert work.version == 0
        assert same(work.groups, expect(recipe, order, 0, versions[0]))
        assert set(work.proofs) == {rollout.id for group in work.groups for rollout in group.rollouts}
        assert all(work.proofs.values())


def test_an_order_waits_for_a_version_that_may_write_it(recipe: Recipe, versions, order_of) -> None:
    with turning(Author(recipe)) as (mill, done):
        mill.offer(0, versions[0])
        mill.order(order_of("l1", step=2, oldest_version=1))
        mill.order(order_of("l2"))
        assert done.get(timeout=PATIENCE_S).order.lease == "l2"
        assert mill.count_done() == {"l1": 0}
        mill.offer(1, versions[1])
        work = done.get(timeout=PATIENCE_S)
    assert (work.order.lease, work.version) == ("l1", 1)
    assert same(work.groups, expect(recipe, work.order, 1, versions[1]))


def test_no_lease_is_written_by_two_versions(recipe: Recipe, versions, order_of) -> None:
    orders = [order_of(f"l{number}", step=2, first=4 * number, count=4) for number in range(6)]
    with turning(Author(recipe), slots=8) as (mill, done):
        mill.offer(0, versions[0])
        for order in orders[:3]:
            mill.order(order)
        first = done.get(timeout=PATIENCE_S)
        mill.offer(1, versions[1])
        for order in orders[3:]:
            mill.order(order)
        works = [first, *(done.get(timeout=PATIENCE_S) for _ in orders[1:])]
        assert mill.version == 1
    assert {work.version for work in works} == {0, 1}
    for work in works:
        spans = {span.version for group in work.groups for rollout in group.rollouts for span in rollout.versions}
        assert spans == {work.version}
        assert same(work.groups, expect(recipe, work.order, work.version, versions[work.version]))


def test_what_is_cancelled_is_not_delivered(recipe: Recipe, versions, order_of) -> None:
    with turning(Author(recipe), slots=4) as (mill, done):
        mill.order(order_of("l1", count=8))
        mill.order(order_of("l2", first=8))
        mill.cancel("l1")
        mill.cancel("nobody")
        mill.offer(0, versions[0])
        assert done.get(timeout=PATIENCE_S).order.lease == "l2"
        mill.order(order_of("l3", first=10))
        assert done.get(timeout=PATIENCE_S).order.lease == "l3"
        assert mill.count_done() == {}
        assert done.empty()


def test_the_smallest_step_goes_first(recipe: Recipe, versions, order_of) -> None:
    with turning(Author(recipe), slots=1) as (mill, done):
        for name, step in (("l1", 3), ("l2", 1), ("l3", 2)):
            mill.order(order_of(name, step=step, count=1))
        mill.offer(0, versions[0])
        leases = [done.get(timeout=PATIENCE_S).order.lease for _ in range(3)]
    assert leases == ["l2", "l3", "l1"]


def test_an_author_that_fails_ends_the_thread_with_its_error(recipe: Recipe, versions, order_of) -> None:
    other = recipe.model_copy(update={"model": "f" * 64})
    mill = Mill(Author(other), lambda _: None, limits=LIMITS)
    mill.offer(0, versions[0])
    with pytest.raises(ConfigError, match="another architecture than the recipe"):
        mill.run()


class _Faulty:
    """A family on a machine whose boxes fail so many times."""

    def __init__(self, inner: Family, faults: int) -> None:
        self._inner, self.faults = inner, faults
        self.name, self.alphabet = inner.name, inner.alphabet
        self.make_task, self.demonstrate = inner.make_task, inner.demonstrate

    def score(self, task: Task, completion: str) -> Score:
        self.faults -= 1
        return own_fault("a zygote died") if self.faults >= 0 else self._inner.score(task, completion)


@pytest.mark.parametrize(("faults", "delivered"), [(1, True), (10**6, False)])
def test_what_this_machine_cannot_score_is_tried_again_and_then_given_back(
    recipe: Recipe, versions, order_of, faults: int, delivered: bool
) -> None:
    author = Author(recipe)
    author.family = _Faulty(author.family, faults)
    heard: Queue[object] = Queue()
    mill = Mill(author, heard.put, limits=LIMITS, give_back=lambda order, reason: heard.put((order.lease, reason)))
    thread = threading.Thread(target=mill.run)
    thread.start()
    mill.offer(0, versions[0])
    order = order_of("l1")
    mill.order(order)
    found = heard.get(timeout=PATIENCE_S)
    mill.stop()
    thread.join(PATIENCE_S)
    if delivered:
        assert isinstance(found, Work)
        assert same(found.groups, expect(recipe, order, 0, versions[0])), "no reward tells of the fault"
    else:
        assert found == ("l1", f"{FAULT}a zygote died")
    assert heard.empty() and mill.count_done() == {}


def test_slots_are_as_many_as_memory_allows(recipe: Recipe, versions) -> None:
    config = open_policy(versions[0]).model.config
    need = 4 * 2 * 2 * 1 * 16 * 64  # bytes: 2 layers, keys and values, 1 head of 16, 64 positions
    assert fit_slots(config, recipe, WorkLimits(memory_mb=1), 10**6) == (1 << 20) // need
    assert fit_slots(config, recipe, WorkLimits(memory_mb=1), 3) == 3
    config.max_position_embeddings = 1 << 30
    config.num_hidden_layers = 1000
    with pytest.raises(ConfigError, match="one rollout of this model may need"):
        fit_slots(config, recipe, WorkLimits(memory_mb=64), 3)


def test_slots_are_reckoned_with_the_prompts_of_a_set_not_with_the_whole_context(recipe: Recipe, versions) -> None:
    """A model with a context of 8,192 tokens and a set of short questions would else decode ten at a time."""
    policy = open_policy(versions[0])
    family = SetFamily(open_set(["chat:1:family:sort?max_length=6:30"]), SetFilter(), {})
    longest = bound_prompts(family, policy.tokenizer)
    assert longest is not None
    assert all(len(encode_task(policy.tokenizer, task)) <= longest < 64 for task in family.list_tasks())
    config = policy.model.config
    config.max_position_embeddings = 8192
    known = fit_slots(config, recipe, WorkLimits(memory_mb=64), 10**6, longest=longest)
    assert known > 50 * fit_slots(config, recipe, WorkLimits(memory_mb=64), 10**6)
    assert bound_prompts(Author(recipe).family, policy.tokenizer) is None, "a family makes its tasks one by one"


def test_a_mill_with_orders_that_no_version_may_write_is_starved(recipe: Recipe, versions, order_of) -> None:
    with turning(Author(recipe)) as (mill, done):
        assert not mill.is_starved, "it has nothing to do"
        mill.offer(0, versions[0])
        mill.order(order_of("l1"))
        done.get(timeout=PATIENCE_S)
        mill.order(order_of("l2", step=3, oldest_version=1))
        assert mill.is_starved
        mill.offer(1, versions[1])
        assert not mill.is_starved
        assert done.get(timeout=PATIENCE_S).version == 1
