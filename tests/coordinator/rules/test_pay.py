"""Pay and loss in integers, with postings that balance."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.pay import Payment, burn_accounts, count_loss, pay_tokens, pay_verdicts, post_payments
from shoal.ledger.event import sort_postings
from shoal.protocol.params import RunParams

ANN, BOB = "a" * 64, "b" * 64
AMOUNTS = st.integers(0, 10**12)
PAYMENTS = st.lists(
    st.builds(Payment, st.sampled_from([ANN, BOB]), st.sampled_from(["pending", "stake"]), st.integers(1, 10**9))
)


def test_the_first_submissions_are_the_bond():
    params = RunParams(price=3, stake_submissions=2)
    assert pay_tokens(params, 3, ANN, 100, staked=1) == Payment(ANN, "stake", 300)
    assert pay_tokens(params, 3, ANN, 100, staked=2) == Payment(ANN, "pending", 300)
    assert pay_tokens(params, 3, ANN, 0, staked=2) is None


def test_verdicts_are_paid_per_owner_into_the_bond_first():
    assert pay_verdicts(RunParams(verdict_price=5, stake_submissions=3), {ANN: 2, BOB: 3}) == [
        Payment(ANN, "stake", 5),
        Payment(BOB, "pending", 5),
    ]
    assert pay_verdicts(RunParams(), {ANN: 0}) == []


@given(PAYMENTS)
def test_postings_of_payments_balance(payments):
    postings = sort_postings(post_payments(payments))
    assert sum(amount for account, amount in postings if account != "mint") == sum(pay.amount for pay in payments)


@given(AMOUNTS, AMOUNTS, AMOUNTS, st.integers(0, 1_000_000))
def test_a_conviction_takes_no_more_than_there_is(pending, stake, unbond, share):
    loss = count_loss(RunParams(slash_share=share), {"pending": pending, "stake": stake, "unbond": unbond})
    assert loss["pending"] == pending and 0 <= loss["stake"] <= stake and 0 <= loss["unbond"] <= unbond
    postings = sort_postings(burn_accounts(ANN, loss))
    assert all(amount < 0 or account == "burn" for account, amount in postings)


def test_nothing_to_take_is_no_posting():
    assert burn_accounts(ANN, {"pending": 0, "stake": 0, "unbond": 0}) == [] and post_payments([]) == []
