"""Work copied from another node, or other than leased: how a validator judges it. Equal work is not a copy."""

import pyarrow.parquet as pq
import pytest

from shoal.protocol.messages import Verdict
from shoal.redteam.registry import Expected, list_attacks, make_behaviours
from shoal.validator import consistency
from shoal.validator.finding import Assessment
from shoal.worker.behaviour import WorkerBehaviour

COPIES = {"copy_all": 8, "copy_one": 1, "copy_encoded": 8, "own_old": 8}
"""number of rollouts, of eight, that are copied"""
BREACHES = {
    "padding": {"termination"},
    "early_stop": {"termination"},
    "stated_prompt": {"request"},
}
HERE, THERE = {"first": 8}, {"first": 4}


def list_failed(opinion: Assessment) -> set[str]:
    return {finding.check for finding in opinion.findings if not finding.passed}


def list_hashes(case) -> set[str]:
    return {entry.hash for entry in case.job.manifest.rollouts if entry.tokens > 2}


def do_both(open_lease_workers, authors, version=0, **of_job):
    """What leaks, and what is made of it; a behaviour without a supplier copies from itself."""
    lease_workers = open_lease_workers(authors)
    source = lease_workers[-1].hand_in("l1", **THERE)
    return source, lease_workers[0].hand_in("l2", **HERE, version=version, **of_job)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("name", COPIES)
def test_copies_are_convicted_by_their_seeds(open_lease_workers, recipe, name, version):
    assert list_attacks()[name].expect is Expected.HARD
    source, copy = do_both(open_lease_workers, make_behaviours(name, recipe), version)
    assert source.opinion().verdict is Verdict.ACCEPTED
    assert list_hashes(source) & list_hashes(copy)
    opinion = copy.opinion()
    assert opinion.verdict is Verdict.HARD
    # A copier that reads the tokens with the true weights has the right numbers for them: only the draw is wrong.
    assert list_failed(opinion) == {"sampling"} or (name == "copy_encoded" and "sampling" in list_failed(opinion))


@pytest.mark.parametrize("name", COPIES)
def test_as_many_are_copied_as_it_says(open_lease_workers, recipe, name):
    source, copy = do_both(open_lease_workers, make_behaviours(name, recipe))
    theirs, ours = ([entry.hash for entry in case.job.manifest.rollouts] for case in (source, copy))
    copied = COPIES[name]
    assert ours[:copied] == theirs[:copied]
    assert copied == 8 or ours[copied:] != theirs[copied:]


def test_a_copied_file_is_encoded_in_its_own_way(open_lease_workers, recipe):
    source, copy = do_both(open_lease_workers, make_behaviours("copy_encoded", recipe))
    codecs = [pq.read_metadata(case.path).row_group(0).column(4).compression for case in (source, copy)]
    assert codecs == ["ZSTD", "UNCOMPRESSED"]
    assert source.job.manifest.blob != copy.job.manifest.blob


@pytest.mark.parametrize("name", ["copy_all", "copy_one", "copy_encoded"])
def test_who_has_nothing_to_copy_yet_is_honest(open_lease_workers, recipe, name):
    copier, _ = open_lease_workers(make_behaviours(name, recipe))
    assert copier.hand_in().opinion().verdict is Verdict.ACCEPTED


@pytest.mark.parametrize("nats", [0.0, 1e9])
@pytest.mark.parametrize("name", COPIES)
def test_copies_that_the_coordinator_knows_are_convicted_whatever_is_drawn(
    open_lease_workers, recipe, monkeypatch, name, nats
):
    """Whether or not they count as too unlikely for a coincidence."""
    monkeypatch.setattr(consistency, "measure_nats", lambda rollout: nats)
    _, copy = do_both(open_lease_workers, make_behaviours(name, recipe), duplicates=(0,), check_ppm=1)
    opinion = copy.opinion()
    assert opinion.verdict is Verdict.HARD and "sampling" in list_failed(opinion)
    assert ("copy" in list_failed(opinion)) is (nats > 0.0)


def test_what_the_seeds_wrote_is_never_convicted_as_a_copy(open_lease_workers, recipe, monkeypatch):
    monkeypatch.setattr(consistency, "measure_nats", lambda rollout: 1e9)
    (lease_worker,) = open_lease_workers([WorkerBehaviour(recipe)])
    opinion = lease_worker.hand_in(duplicates=(0,), check_ppm=1).opinion()
    assert opinion.verdict is Verdict.SOFT and list_failed(opinion) == {"copy"}
    assert {finding.check for finding in opinion.findings} >= {"sampling", "logprob"}


def test_two_who_compute_the_same_groups_hand_in_the_same_rollouts_and_both_are_right(open_lease_workers, recipe):
    """A backup lease: the same groups, a different node, other batches. The coordinator does not count it as a copy."""
    (one,), (other,) = (
        open_lease_workers([WorkerBehaviour(recipe)]),
        open_lease_workers([WorkerBehaviour(recipe)], slots=3),
    )
    first, second = one.hand_in("l1", **HERE), other.hand_in("l2", **HERE)
    assert first.job.manifest.rollouts == second.job.manifest.rollouts
    assert [case.opinion().verdict for case in (first, second)] == [Verdict.ACCEPTED] * 2


def test_who_copies_at_the_same_place_hands_in_honest_work(open_lease_workers, recipe):
    """Nothing is wrong with it, and nothing is gained: a group is paid once."""
    copier, supplier = open_lease_workers(make_behaviours("copy_all", recipe))
    source, copy = supplier.hand_in("l1", **HERE), copier.hand_in("l2", **HERE)
    assert source.job.manifest.rollouts == copy.job.manifest.rollouts
    assert copy.opinion().verdict is Verdict.ACCEPTED


def test_all_attacks_of_their_kind_are_tried_here():
    assert set(BREACHES) == {name for name, attack in list_attacks().items() if attack.expect is Expected.SOFT}


@pytest.mark.parametrize("name", BREACHES)
def test_what_breaks_a_rule_is_not_paid_each_time(open_lease_workers, recipe, name):
    (lease_worker,) = open_lease_workers(make_behaviours(name, recipe))
    for lease, version in (("l1", 0), ("l2", 0), ("l3", 1)):
        opinion = lease_worker.hand_in(lease, version=version).opinion()
        assert opinion.verdict is Verdict.SOFT and list_failed(opinion) == BREACHES[name]
