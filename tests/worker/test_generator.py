"""Generation: leases in, work out; one version per lease, nothing lost, nothing mixed up."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import pytest

from shoal.config.tasks import FilterConfig
from shoal.engine.torch import TorchEngine
from shoal.errors import ConfigError
from shoal.group import encode_task, generate_groups
from shoal.policy.model import Policy, open_policy
from shoal.recipe import Recipe
from shoal.rollout import Score
from shoal.tasks.base import Family, Task
from shoal.tasks.sets.family import SetFamily
from shoal.tasks.sets.sources import open_set
from shoal.tasks.verify.base import FAULT, own_fault
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour, bound_prompts, fit_slots
from shoal.worker.generator import Generator
from shoal.worker.leases import LeaseState, LeaseTable
from shoal.worker.orders import LeaseOrder, WorkLimits, take_order

LIMITS = WorkLimits()
PATIENCE_S = 60.0


@contextmanager
def running(
    behaviour: WorkerBehaviour, slots: int = 16
) -> Iterator[tuple[Generator, LeaseTable, "Queue[FinishedWork]"]]:
    """A generator in its thread, stopped at the end of the block."""
    done: Queue[FinishedWork] = Queue()
    leases = LeaseTable()
    generator = Generator(behaviour, leases, done.put, limits=LIMITS, slots=slots)
    thread = threading.Thread(target=generator.run)
    thread.start()
    try:
        yield generator, leases, done
    finally:
        generator.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture
def order_of(recipe: Recipe, make_lease):
    def make(name: str, **changes: object) -> LeaseOrder:
        return take_order(make_lease(name, **changes), recipe, LIMITS)

    return make


def expect(recipe: Recipe, order: LeaseOrder, version: int, folder: Path):
    """The groups of an order, generated alone."""
    author, policy = WorkerBehaviour(recipe), open_policy(folder)
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
    # The same indices of two steps: their rollouts have the same names.
    orders = [order_of("l1"), order_of("l2", step=2), order_of("l3", first=2, count=1)]
    with running(WorkerBehaviour(recipe), slots) as (generator, leases, done):
        for order in orders:
            leases.hold(order)
        generator.update_weights(0, versions[0])
        works = {work.order.lease: work for work in (done.get(timeout=PATIENCE_S) for _ in orders)}
    for order in orders:
        work = works[order.lease]
        assert work.version == 0
        assert same(work.groups, expect(recipe, order, 0, versions[0]))
        assert set(work.proofs) == {rollout.id for group in work.groups for rollout in group.rollouts}
        assert all(work.proofs.values())


def test_an_order_waits_for_a_version_that_may_write_it(recipe: Recipe, versions, order_of) -> None:
    with running(WorkerBehaviour(recipe)) as (generator, leases, done):
        generator.update_weights(0, versions[0])
        leases.hold(order_of("l1", step=2, version=1))
        leases.hold(order_of("l2"))
        assert done.get(timeout=PATIENCE_S).order.lease == "l2"
        assert [record.order.lease for record in leases.list_records(LeaseState.HELD)] == ["l1"]
        generator.update_weights(1, versions[1])
        work = done.get(timeout=PATIENCE_S)
    assert (work.order.lease, work.version) == ("l1", 1)
    assert same(work.groups, expect(recipe, work.order, 1, versions[1]))


def test_no_lease_is_written_by_two_versions(recipe: Recipe, versions, order_of) -> None:
    orders = [
        order_of(f"l{number}", step=2, first=4 * number, count=4, version=version)
        for number, version in enumerate((0, 0, 0, 1, 0, 1))
    ]
    with running(WorkerBehaviour(recipe), slots=8) as (generator, leases, done):
        generator.update_weights(0, versions[0])
        for order in orders[:3]:
            leases.hold(order)
        first = done.get(timeout=PATIENCE_S)
        generator.update_weights(1, versions[1])
        for order in orders[3:]:
            leases.hold(order)
        works = [first, *(done.get(timeout=PATIENCE_S) for _ in orders[1:])]
        assert generator.version == 1
    assert [work.version for work in works] == [work.order.version for work in works]
    assert [work.version for work in works] == [0, 0, 0, 0, 1, 1], "those of the loaded version first"
    for work in works:
        spans = {span.version for group in work.groups for rollout in group.rollouts for span in rollout.versions}
        assert spans == {work.version}
        assert same(work.groups, expect(recipe, work.order, work.version, versions[work.version]))


def test_the_next_version_takes_the_memory_of_the_last(recipe: Recipe, versions, order_of) -> None:
    opened: list[tuple[int, ...]] = []

    class Behaviour(WorkerBehaviour):
        def open_policy(self, version: int, folder: Path) -> Policy:
            policy = super().open_policy(version, folder)
            opened.append(tuple(tensor.data_ptr() for tensor in policy.model.parameters()))
            return policy

    with running(Behaviour(recipe)) as (generator, leases, done):
        for version in (0, 1):
            generator.update_weights(version, versions[version])
            leases.hold(order_of(f"l{version}", step=1 + version, version=version))
            work = done.get(timeout=PATIENCE_S)
            assert same(work.groups, expect(recipe, work.order, version, versions[version]))
        engine = generator._engine
        assert isinstance(engine, TorchEngine)
        assert opened[0] == opened[1] == tuple(tensor.data_ptr() for tensor in engine._model.parameters())


def test_what_is_cancelled_is_not_delivered(recipe: Recipe, versions, order_of) -> None:
    with running(WorkerBehaviour(recipe), slots=4) as (generator, leases, done):
        leases.hold(order_of("l1", count=8))
        leases.hold(order_of("l2", first=8))
        leases.end("l1")
        leases.end("nobody")
        generator.update_weights(0, versions[0])
        assert done.get(timeout=PATIENCE_S).order.lease == "l2"
        leases.hold(order_of("l3", first=10))
        assert done.get(timeout=PATIENCE_S).order.lease == "l3"
        assert generator.count_done() == {}
        assert done.empty()


def test_the_smallest_step_goes_first(recipe: Recipe, versions, order_of) -> None:
    with running(WorkerBehaviour(recipe), slots=1) as (generator, leases, done):
        for name, step in (("l1", 3), ("l2", 1), ("l3", 2)):
            leases.hold(order_of(name, step=step, count=1))
        generator.update_weights(0, versions[0])
        names = [done.get(timeout=PATIENCE_S).order.lease for _ in range(3)]
    assert names == ["l2", "l3", "l1"]


def test_a_behaviour_that_fails_ends_the_thread_with_its_error(recipe: Recipe, versions, order_of) -> None:
    other = recipe.model_copy(update={"model": "f" * 64})
    generator = Generator(WorkerBehaviour(other), LeaseTable(), lambda _: None, limits=LIMITS)
    generator.update_weights(0, versions[0])
    with pytest.raises(ConfigError, match="different architecture than the recipe"):
        generator.run()


class _Faulty:
    """A family on a machine whose sandboxes fail this many times."""

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
    author = WorkerBehaviour(recipe)
    author.family = _Faulty(author.family, faults)
    heard: Queue[object] = Queue()
    leases = LeaseTable()
    generator = Generator(
        author,
        leases,
        heard.put,
        limits=LIMITS,
        give_back=lambda order, reason: heard.put((order.lease, reason)),
    )
    thread = threading.Thread(target=generator.run)
    thread.start()
    generator.update_weights(0, versions[0])
    order = order_of("l1")
    leases.hold(order)
    found = heard.get(timeout=PATIENCE_S)
    generator.stop()
    thread.join(PATIENCE_S)
    if delivered:
        assert isinstance(found, FinishedWork)
        assert same(found.groups, expect(recipe, order, 0, versions[0])), "no reward is affected by the fault"
    else:
        assert found == ("l1", f"{FAULT}a zygote died")
    assert heard.empty() and generator.count_done() == {}


def test_slots_are_as_many_as_memory_allows(recipe: Recipe, versions) -> None:
    config = open_policy(versions[0]).model.config
    need = 4 * 2 * 2 * 1 * 16 * 64  # bytes: 2 layers, keys and values, 1 head of 16, 64 positions
    assert fit_slots(config, recipe, WorkLimits(memory_mb=1), 10**6) == (1 << 20) // need
    assert fit_slots(config, recipe, WorkLimits(memory_mb=1), 3) == 3
    config.max_position_embeddings = 1 << 30
    config.num_hidden_layers = 1000
    with pytest.raises(ConfigError, match="one rollout of this model may need"):
        fit_slots(config, recipe, WorkLimits(memory_mb=64), 3)


def test_slots_are_computed_from_the_prompts_of_a_set_not_the_whole_context(recipe: Recipe, versions) -> None:
    """Otherwise a model with a context of 8,192 tokens would decode only ten short questions at a time."""
    policy = open_policy(versions[0])
    family = SetFamily(open_set(["chat:1:family:sort?max_length=6:30"]), FilterConfig(), {})
    longest = bound_prompts(family, policy.tokenizer)
    assert longest is not None
    assert all(len(encode_task(policy.tokenizer, task)) <= longest < 64 for task in family.list_tasks())
    config = policy.model.config
    config.max_position_embeddings = 8192
    known = fit_slots(config, recipe, WorkLimits(memory_mb=64), 10**6, longest=longest)
    assert known > 50 * fit_slots(config, recipe, WorkLimits(memory_mb=64), 10**6)
    assert bound_prompts(WorkerBehaviour(recipe).family, policy.tokenizer) is None, (
        "a family makes its tasks one by one"
    )


def test_a_generator_with_leases_that_no_version_may_write_lacks_weights(recipe: Recipe, versions, order_of) -> None:
    with running(WorkerBehaviour(recipe)) as (generator, leases, done):
        assert not generator.lacks_weights, "it has nothing to do"
        generator.update_weights(0, versions[0])
        leases.hold(order_of("l1"))
        done.get(timeout=PATIENCE_S)
        leases.hold(order_of("l2", step=3, version=1))
        assert generator.lacks_weights
        generator.update_weights(1, versions[1])
        assert not generator.lacks_weights
        assert done.get(timeout=PATIENCE_S).version == 1
