"""From verdicts to the outcome of a submission."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.messages import SubmissionState, Verdict
from shoal.protocol.outcome import Vote, decide_outcome, end_waiting, list_majority

NAMES = {
    "a": Verdict.ACCEPTED,
    "b": Verdict.ACCEPTED,
    "f": Verdict.FORM,
    "s": Verdict.SOFT,
    "h": Verdict.HARD,
    "i": Verdict.INCONCLUSIVE,
}


def read_votes(text):
    """a, f, s, h, i are the initials of the verdicts; b accepts with other numbers than a; c is a crash"""
    sights = {"a": (7, "1"), "b": (7, "0")}
    return [
        Vote(Verdict.INCONCLUSIVE, crashed=True) if name == "c" else Vote(NAMES[name], sight=sights.get(name, (0, "")))
        for name in text
    ]


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
        ("hai", None),
        ("haiis", "rejected_soft"),
        ("haiiii", "inconclusive"),
        ("i", None),
        ("ia", "accepted"),
        ("ih", None),
        ("ihh", "rejected_hard"),
        ("ihi", None),
        ("ihiiii", "rejected_soft"),
        ("iii", None),
        ("iiiiii", "inconclusive"),
        ("c", None),
        ("cc", "rejected_form"),
        ("ca", "accepted"),
        ("cic", "rejected_form"),
    ],
)
def test_outcomes(votes, outcome):
    assert decide_outcome(read_votes(votes), 3) == (outcome and SubmissionState(outcome))


@pytest.mark.parametrize(
    ("votes", "outcome"),
    [
        ("a", None),
        ("f", None),
        ("s", None),
        ("aa", "accepted"),
        ("ss", "rejected_soft"),
        ("ff", "rejected_form"),
        ("fs", "rejected_soft"),
        ("as", None),
        ("asa", "accepted"),
        ("sas", "rejected_soft"),
        ("saa", "accepted"),
        ("ahh", "rejected_hard"),
        ("ai", None),
        ("aii", None),
        ("aiiiii", "accepted"),
        ("sii", None),
        ("siiiii", "rejected_soft"),
        ("asi", None),
        ("asia", "accepted"),
        ("asiiii", "inconclusive"),
        ("ab", None),
        ("aba", "accepted"),
        ("abs", "inconclusive"),
    ],
)
def test_where_one_verdict_is_not_enough_two_that_agree_are(votes, outcome):
    assert decide_outcome(read_votes(votes), 3, doubted=True) == (outcome and SubmissionState(outcome))


@pytest.mark.parametrize(
    ("votes", "agreed"),
    [("a", "0"), ("as", "00"), ("aa", "11"), ("asa", "101"), ("shf", "111"), ("aba", "101"), ("ahih", "0101")],
)
def test_the_majority_consists_of_verdicts_that_agree_with_another(votes, agreed):
    assert list_majority(read_votes(votes)) == [letter == "1" for letter in agreed]


VOTES = st.lists(st.sampled_from("abfshic"), max_size=6)


@given(VOTES)
def test_hard_takes_two_and_crashes_are_never_paid(letters):
    outcome = decide_outcome(read_votes(letters), 3)
    if outcome is SubmissionState.HARD:
        assert letters.count("h") >= 2
    if outcome is SubmissionState.ACCEPTED:
        assert {"a", "b"} & set(letters) and letters.count("c") < 2


@given(VOTES)
def test_three_clear_verdicts_decide_and_so_do_six_of_any_kind(letters):
    spoken = [letter for letter in letters if letter not in "ic"]
    assert len(spoken) < 3 or decide_outcome(read_votes(letters), 3) is not None
    assert decide_outcome(read_votes([*letters, *"iiiiii"]), 3) is not None


@given(VOTES)
def test_a_timeout_never_convicts_and_pays_only_an_uncontested_acceptance(letters):
    outcome = end_waiting(read_votes(letters))
    assert outcome is not SubmissionState.HARD
    if outcome is SubmissionState.ACCEPTED:
        assert sum(letter in "abfsh" for letter in letters) == 1


@given(VOTES, st.booleans())
def test_what_is_accepted_before_the_last_round_was_accepted_by_the_verdict_that_decided(letters, doubted):
    votes = read_votes(letters)
    for number in range(1, len(votes) + 1):
        outcome = decide_outcome(votes[:number], 9, doubted=doubted)
        if outcome is not None:
            assert outcome is not SubmissionState.ACCEPTED or votes[number - 1].verdict is Verdict.ACCEPTED
            return
