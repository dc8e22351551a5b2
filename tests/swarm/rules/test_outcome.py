"""From verdicts to what becomes of a submission."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.messages import SubmissionState, Verdict
from shoal.swarm.rules.outcome import Vote, decide_outcome, end_waiting

NAMES = {"a": Verdict.ACCEPTED, "f": Verdict.FORM, "s": Verdict.SOFT, "h": Verdict.HARD, "i": Verdict.INCONCLUSIVE}


def read_votes(text):
    """a, f, s, h, i as the verdicts begin; c for a crash"""
    return [Vote(Verdict.INCONCLUSIVE, crashed=True) if name == "c" else Vote(NAMES[name]) for name in text]


@pytest.mark.parametrize(
    ("votes", "outcome"),
    [
        ("", None),
        ("a", "accepted"),
        ("f", "rejected_form"),
        ("s", "rejected_soft"),
        ("h", None),
        ("hh", "rejected_hard"),
        ("hs", "rejected_soft"),
        ("hf", "rejected_soft"),
        ("ha", None),
        ("haa", "accepted"),
        ("hah", "rejected_hard"),
        ("has", "rejected_soft"),
        ("hai", "inconclusive"),
        ("i", None),
        ("ia", "accepted"),
        ("ih", None),
        ("ihh", "rejected_hard"),
        ("ihi", "rejected_soft"),
        ("iii", "inconclusive"),
        ("c", None),
        ("cc", "rejected_form"),
        ("ca", "accepted"),
        ("cic", "rejected_form"),
    ],
)
def test_outcomes(votes, outcome):
    assert decide_outcome(read_votes(votes), 3) == (outcome and SubmissionState(outcome))


VOTES = st.lists(st.sampled_from("afshic"), max_size=6)


@given(VOTES)
def test_hard_takes_two_and_crashes_are_never_paid(letters):
    outcome = decide_outcome(read_votes(letters), 3)
    if outcome is SubmissionState.HARD:
        assert letters.count("h") >= 2
    if outcome is SubmissionState.ACCEPTED:
        assert letters.count("a") > 0 and letters.count("c") < 2


@given(VOTES)
def test_three_verdicts_decide(letters):
    assert len(letters) < 3 or decide_outcome(read_votes(letters), 3) is not None


@given(VOTES)
def test_waiting_in_vain_never_pays_and_never_convicts(letters):
    assert end_waiting(read_votes(letters)) in (SubmissionState.SOFT, SubmissionState.INCONCLUSIVE)


@given(VOTES)
def test_what_is_accepted_was_accepted_by_the_verdict_that_decided(letters):
    votes = read_votes(letters)
    for number in range(1, len(votes) + 1):
        outcome = decide_outcome(votes[:number], 9)
        if outcome is not None:
            assert outcome is not SubmissionState.ACCEPTED or votes[number - 1].verdict is Verdict.ACCEPTED
            return
