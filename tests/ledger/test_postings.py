import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.ledger.event import (
    MAX_POSTINGS,
    Posting,
    PostingError,
    check_account,
    check_postings,
    encode_postings,
    move_credit,
    name_account,
    sort_postings,
)

OWNER = "ab" * 32
PENDING = f"pending:{OWNER}"


def test_a_payment_is_two_postings_that_sum_to_zero() -> None:
    assert move_credit("mint", PENDING, 5) == (Posting("mint", -5), Posting(PENDING, 5))
    assert move_credit(PENDING, "burn", 5) == (Posting("burn", 5), Posting(PENDING, -5))


@pytest.mark.parametrize("amount", [0, -1])
def test_a_payment_of_nothing_or_less_is_refused(amount: int) -> None:
    with pytest.raises(PostingError, match="must be positive"):
        move_credit("mint", PENDING, amount)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Mint",
        "mint ",
        "mint\n",
        "pending",
        "pending:",
        f"pending:{OWNER.upper()}",
        f"pending:{OWNER}0",
        f"other:{OWNER}",
        f" pending:{OWNER}",
        f"pending:{OWNER}\n",
        f"mint:{OWNER}",
        f"pending:{OWNER[:-1]}",
        f"pending:{OWNER[:-1]}g",
    ],
)
def test_a_name_that_is_no_account_is_refused(name: str) -> None:
    with pytest.raises(PostingError, match="invalid account name"):
        check_account(name)


@pytest.mark.parametrize("kind", ["pending", "avail", "stake", "unbond", "redeeming"])
def test_an_owner_has_one_account_of_each_kind(kind: str) -> None:
    assert name_account(kind, OWNER) == f"{kind}:{OWNER}"


@pytest.mark.parametrize(
    ("postings", "reason"),
    [
        ([("mint", -5), (PENDING, 4)], "sum to -1"),
        ([(PENDING, 5)], "sum to 5"),
        ([(PENDING, 5), ("treasury", -3), ("treasury", -2)], "duplicate account"),
        ([("treasury", -5), (PENDING, 5)], "not sorted"),
        ([("mint", 5), (PENDING, -5)], "mint cannot receive"),
        ([("burn", -5), (PENDING, 5)], "burn cannot pay"),
        ([("mint", 0)], "must be non-zero"),
        ([("mint", -(1 << 63)), (PENDING, 1 << 63)], "below 2\\*\\*63"),
        ([("nobody", 0)], "invalid account name"),
    ],
)
def test_postings_that_break_a_rule_are_refused(postings: list[tuple[str, int]], reason: str) -> None:
    with pytest.raises(PostingError, match=reason):
        check_postings([Posting(*item) for item in postings])


def test_too_many_postings_are_refused() -> None:
    accounts = [f"pending:{index:064x}" for index in range(MAX_POSTINGS)]
    postings = [Posting("mint", -len(accounts)), *(Posting(account, 1) for account in accounts)]
    with pytest.raises(PostingError, match="at most"):
        check_postings(postings)


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 1 << 40), min_size=1, max_size=20))
def test_any_order_of_the_same_postings_gives_the_same_bytes(amounts: dict[int, int]) -> None:
    postings = [Posting(f"avail:{owner:064x}", amount) for owner, amount in amounts.items()]
    postings.append(Posting("mint", -sum(amounts.values())))
    assert encode_postings(sort_postings(postings)) == encode_postings(sort_postings(reversed(postings)))
    assert sum(posting.amount for posting in sort_postings(postings)) == 0
