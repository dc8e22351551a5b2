"""Workers that cheat in weights, sampling, proofs or text, judged by a real validator that checks everything.

The policy sorts some lists and fails on others, so that it matters which samples are kept.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.fixtures.benches import load_bench
from tests.fixtures.paths import TINY

from shoal.config.run import LearnerConfig, load_config
from shoal.errors import ConfigError
from shoal.launch.first_version import calibrate_start, write_start
from shoal.learner.learner import Learner
from shoal.policy.model import open_policy, save_policy
from shoal.protocol.messages import Verdict
from shoal.recipe import Recipe, dump_recipe
from shoal.redteam.attacks import sampling
from shoal.redteam.behaviours.forged_work import fit_proofs, list_rollouts
from shoal.redteam.registry import Expected, list_attacks, make_behaviours
from shoal.rollout import Group
from shoal.toploc.calibration import hash_model
from shoal.util.process import use_threads
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour

_offline, _power = load_bench("offline_work"), load_bench("redteam_power")
OfflineGenerator, OfflineRun, open_run = _offline.OfflineGenerator, _offline.OfflineRun, _offline.open_run
check_work, list_changed, make_order = _offline.check_work, _offline.list_changed, _offline.make_order
measure_power = _power.measure_power
SETTINGS = (
    "policy.tiny.layers=2",
    "tasks.name=sort",
    "tasks.options={min_length=3, max_length=4}",
    "sft.steps=60",
    "sft.batch=32",
)
COPIES = {"copy_all", "copy_one", "copy_encoded", "own_old"}
"""attacks that need other workers to copy from: see test_copies.py"""
WEIGHTS = dict.fromkeys(("small", "int8", "int8_groups", "int4", "stale", "previous", "adapter"), "logprob")
PROOFS = dict.fromkeys(("constant_proof", "null_proof"), "toploc_fault")
PROOFS |= dict.fromkeys(("average_proof", "replayed_proof"), "toploc_exponent")
REWARDS = dict.fromkeys(("claimed_reward", "flipped_reward", "rare_lie"), "reward")
SEEN_BY = WEIGHTS | PROOFS | REWARDS
"""the check that must detect it; for all others the sampling check"""
HARD = [name for name, attack in list_attacks().items() if attack.expect is Expected.HARD and not attack.scripted]
LATE = {"stale", "previous"}
"""honest while there is only one version"""


@pytest.fixture(scope="session")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> OfflineRun:
    """A fine-tuned policy and the one after a training step, calibrated like the demo."""
    folder = tmp_path_factory.mktemp("offline_run")
    config = load_config(TINY, [*SETTINGS, f"out={folder}"])
    first = write_start(config, folder / "v0")
    calibration = calibrate_start(first, config, chunks=400, tokens=64)
    recipe = Recipe(
        family=config.tasks.name,
        options=config.tasks.options,
        group_size=config.batch.group_size,
        max_tokens=config.engine.max_tokens,
        model=hash_model(first.model),
        weights="0" * 64,
        calibration="0" * 64,
    )
    start = OfflineRun(recipe=recipe, folders={0: folder / "v0"}, calibration=calibration)
    second = open_policy(folder / "v0")
    generator = OfflineGenerator(WorkerBehaviour(recipe))
    generator.load(0, folder / "v0")
    groups = generator.write(make_order(start, 0, groups=8)).groups
    Learner(second.model, LearnerConfig(lr=1e-4, warmup_steps=0), max_tokens=config.engine.max_tokens).train_step(
        groups
    )
    save_policy(second, folder / "v1")
    return OfflineRun(recipe=recipe, folders={0: folder / "v0", 1: folder / "v1"}, calibration=calibration)


@pytest.fixture(scope="session")
def warm(offline_run: OfflineRun, open_lease_source):
    return open_lease_source(offline_run.recipe, offline_run.calibration, dict(offline_run.folders))


@pytest.fixture
def open_lease_worker(offline_run: OfflineRun, warm, open_lease_workers):
    """A worker with an attack, in the fine-tuned run."""

    def open_one(name: str, **options: object):
        return open_lease_workers(make_behaviours(name, offline_run.recipe), at=warm, **options)[0]

    return open_one


@pytest.mark.parametrize("name", [name for name in HARD if name not in COPIES])
def test_a_cheat_is_found_out_in_its_first_submission(open_lease_worker, name: str) -> None:
    lease_worker = open_lease_worker(name)
    if name in LATE:
        assert lease_worker.hand_in("l1", version=0).opinion().verdict is Verdict.ACCEPTED
    opinion, first = lease_worker.hand_in("l2", version=1).opinion(), 0
    while name == "top_p" and opinion.verdict is Verdict.ACCEPTED and first < 20:
        # No draw of so few tokens fell into the tail: that was honest work.
        first += 2
        opinion = lease_worker.hand_in(f"l{first}", first=first, version=1).opinion()
    failed = {finding.check for finding in opinion.findings if not finding.passed}
    assert opinion.verdict is Verdict.HARD, opinion.findings[:3]
    assert SEEN_BY.get(name, "sampling") in failed
    assert opinion.tokens == 0


@pytest.mark.parametrize(("slots", "threads"), [(1, 1), (3, 2), (64, 2)])
def test_an_honest_worker_is_accepted_whatever_its_settings(
    offline_run: OfflineRun, warm, open_lease_workers, slots: int, threads: int
) -> None:
    with use_threads(threads):
        (lease_worker,) = open_lease_workers([WorkerBehaviour(offline_run.recipe)], slots=slots, at=warm)
        for version in (0, 1):
            opinion = lease_worker.hand_in(f"l{version}", version=version).opinion()
            assert opinion.verdict is Verdict.ACCEPTED, opinion.findings[:3]


def test_where_two_tokens_are_a_hair_apart_either_is_accepted(open_lease_worker) -> None:
    assert open_lease_worker("noise").hand_in(version=1).opinion().verdict is Verdict.ACCEPTED


def test_noise_is_taken_only_for_a_better_end_and_found_out_where_it_is_more_than_a_hair(
    offline_run: OfflineRun, monkeypatch
) -> None:
    monkeypatch.setattr(sampling, "TOLERANCE", 0.2)
    done, base = write_both("noise", offline_run)
    changed = [not np.array_equal(a.token_ids, b.token_ids) for a, b in pair_rollouts(done, base)]
    rewards = [np.concatenate([group.rewards for group in work.groups]) for work in (done, base)]
    assert any(changed) and not all(changed)
    assert (rewards[0] > rewards[1]).tolist() == changed
    reports = check_work(done, open_policy(offline_run.folders[1]), offline_run, seeded=True)
    assert [not report.passed for report in reports] == changed


@pytest.mark.parametrize("name", ["best_of_n", "cherry_samples"])
def test_what_is_good_enough_is_handed_in_as_it_is(offline_run: OfflineRun, name: str) -> None:
    done, base = write_both(name, offline_run)
    for own, true in zip(done.groups, base.groups, strict=True):
        assert (own.rewards >= true.rewards).all()
        for a, b, reward in zip(own.rollouts, true.rollouts, true.rewards, strict=True):
            assert reward < 1.0 or np.array_equal(a.token_ids, b.token_ids)
    assert sum(g.rewards.sum() for g in done.groups) > sum(g.rewards.sum() for g in base.groups)


@pytest.mark.parametrize("name", ["best_of_n", "cherry_samples", "edited_tokens"])
def test_leases_without_anything_better_are_known(offline_run: OfflineRun, name: str) -> None:
    (cheat,) = make_behaviours(name, offline_run.recipe)
    _, base = write_both(name, offline_run)
    cheat.open_policy(1, offline_run.folders[1])
    assert not cheat.unchanged
    honest = {rollout.id: rollout.token_ids for rollout in list_rollouts(base)}
    cheat.substitute = lambda plans, work: honest
    cheat.finish(base)
    assert cheat.unchanged == (set() if name == "edited_tokens" else {base.order.lease})


@pytest.mark.parametrize("name", ["poison", "long_poison"])
def test_poison_is_right(offline_run: OfflineRun, name: str) -> None:
    done, base = write_both(name, offline_run)
    assert all((group.rewards == 1.0).all() for group in done.groups)
    assert done.num_tokens > base.num_tokens
    if name == "long_poison":
        assert all(rollout.num_tokens == offline_run.recipe.max_tokens for rollout in list_rollouts(done))


def test_loops_are_as_long_as_can_be(offline_run: OfflineRun) -> None:
    longest = offline_run.recipe.max_tokens
    done, base = write_both("loops", offline_run)
    for own, true in pair_rollouts(done, base):
        assert own.num_tokens == longest
        assert own.token_ids[: true.num_tokens - 1].tolist() == true.token_ids[:-1].tolist()


def test_a_cut_changes_every_answer_however_short(offline_run: OfflineRun) -> None:
    """A policy may learn to answer in one token: a cut that rounds up would then submit honest work."""
    (cheat,) = make_behaviours("truncation", offline_run.recipe)
    end = cheat.open_policy(1, offline_run.folders[1]).eos_id
    _, base = write_both("truncation", offline_run)
    for length in range(1, offline_run.recipe.max_tokens):
        work = replace(base, groups=tuple(shorten_answers(group, [end - 1] * length + [end]) for group in base.groups))
        for ids in cheat.substitute((), work).values():
            assert list(ids) == [end - 1] * (length // 2) + [end]


def test_one_token_is_edited_and_the_rest_sampled(offline_run: OfflineRun) -> None:
    for own, true in pair_rollouts(*write_both("edited_tokens", offline_run)):
        assert not np.array_equal(own.token_ids, true.token_ids)


def test_lent_proofs_are_as_many_as_asked_for_and_end_with_a_last_one() -> None:
    assert fit_proofs([b"a", b"b", b"z"], 2) == [b"a", b"z"]
    assert fit_proofs([b"a", b"z"], 4) == [b"a", b"a", b"a", b"z"]
    assert fit_proofs([b"z"], 3) == [b"z", b"z", b"z"]


def test_power_counts_what_was_changed_and_what_was_caught(offline_run: OfflineRun) -> None:
    power = measure_power("top_p", offline_run, leases=6, groups=2)
    assert (power.num_leases, power.num_rollouts, power.seeded) == (6, 48, True)
    assert 0 < power.changed.value < 1
    assert power.rollouts.value == power.submissions.value == 1.0 > power.rollouts.low
    assert power.rollouts_by_check == {"sampling": power.rollouts}
    assert power.alarms == 0


def test_without_seeds_chosen_samples_are_not_seen(offline_run: OfflineRun) -> None:
    power = measure_power("best_of_n", offline_run, leases=4, groups=2, seeded=False)
    assert power.changed.value > 0 and not power.seeded
    assert power.rollouts.value == 0.0 and power.reward > power.honest_reward


def test_honest_work_has_no_power(offline_run: OfflineRun) -> None:
    power = measure_power(WorkerBehaviour(offline_run.recipe), offline_run, leases=4, groups=2, slots=3)
    assert (power.attack, power.changed.value, power.alarms) == ("WorkerBehaviour", 0.0, 0)
    assert (power.submissions.low, power.submissions.high) == (0.0, 1.0)
    assert power.reward == power.honest_reward and power.num_tokens == power.honest_tokens


def test_the_ground_of_a_swarm_is_what_its_folder_holds(offline_run: OfflineRun, tmp_path: Path) -> None:
    launch = tmp_path / "launch"
    launch.mkdir()
    (launch / "recipe.json").write_bytes(dump_recipe(offline_run.recipe))
    offline_run.calibration.save(launch / "calibration.json")
    (tmp_path / "versions" / "v000003").mkdir(parents=True)
    (tmp_path / "versions" / "published.jsonl").touch()
    found = open_run(tmp_path)
    assert found.recipe == offline_run.recipe and found.calibration == offline_run.calibration
    assert found.folders == {0: launch / "v0", 3: tmp_path / "versions" / "v000003"}
    with pytest.raises(ConfigError, match="not the folder of a swarm"):
        open_run(launch)


def write_both(name: str, offline_run: OfflineRun) -> tuple[FinishedWork, FinishedWork]:
    """The work of an attack and of an honest worker for the same lease."""
    order = make_order(offline_run, 3, groups=4)
    found = []
    for author in (make_behaviours(name, offline_run.recipe)[0], WorkerBehaviour(offline_run.recipe)):
        generator = OfflineGenerator(author)
        generator.load(0, offline_run.folders[0])
        generator.load(1, offline_run.folders[1])
        found.append(generator.write(order))
    assert any(list_changed(*found))
    return found[0], found[1]


def pair_rollouts(done: FinishedWork, base: FinishedWork) -> Iterator:
    return zip(list_rollouts(done), list_rollouts(base), strict=True)


def shorten_answers(group: Group, ids: list[int]) -> Group:
    """A group whose rollouts all have the same tokens."""
    tokens, logprobs = np.array(ids, dtype=np.int32), np.zeros(len(ids), dtype=np.float32)
    return replace(group, rollouts=tuple(replace(r, token_ids=tokens, logprobs=logprobs) for r in group.rollouts))
