"""Delegations: what an owner signed, for how long, and taken back."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.identity.authenticator import check_delegation
from shoal.identity.delegation import (
    MAX_LIFETIME_MS,
    Delegation,
    Grant,
    Revocation,
    Scope,
    open_delegation,
    open_revocation,
    sign_delegation,
    sign_revocation,
)
from shoal.identity.documents import DocumentError, Tag, sign_document
from shoal.identity.keys import Key
from shoal.net.api_error import ApiError
from shoal.util.canonical import decode_canonical

OWNER, NODE, OTHER = Key.generate(), Key.generate(), Key.generate()
START_MS, END_MS = 1_000_000, 5_000_000
BODY = {
    "max_leases": 4,
    "node": NODE.public,
    "not_after_ms": END_MS,
    "not_before_ms": START_MS,
    "run": "run-1",
    "scopes": ["validate", "work"],
}


def make_grant(**changes: Any) -> Grant:
    fields: dict[str, Any] = {
        "node": NODE.public,
        "run": "run-1",
        "not_before_ms": START_MS,
        "not_after_ms": END_MS,
        "scopes": frozenset({Scope.WORK, Scope.VALIDATE}),
        "max_leases": 4,
    }
    return Grant(**{**fields, **changes})


def check(delegation: Delegation, **changes: Any) -> None:
    given_values: dict[str, Any] = {"node": NODE.public, "run": "run-1", "now_ms": START_MS}
    check_delegation(delegation, **{**given_values, **changes})


def test_a_delegation_comes_back_as_it_was_signed() -> None:
    data = sign_delegation(OWNER, make_grant())
    delegation = open_delegation(data)
    assert (delegation.owner, delegation.grant) == (OWNER.public, make_grant())
    assert decode_canonical(data, max_bytes=10_000)["body"] == BODY
    check(delegation)


@settings(max_examples=40)
@given(
    scopes=st.frozensets(st.sampled_from(Scope), min_size=1),
    start=st.integers(0, 10**13),
    length=st.integers(1, MAX_LIFETIME_MS),
    leases=st.integers(0, 4096),
)
def test_every_grant_has_one_document(scopes: frozenset[Scope], start: int, length: int, leases: int) -> None:
    grant = make_grant(scopes=scopes, not_before_ms=start, not_after_ms=start + length, max_leases=leases)
    data = sign_delegation(OWNER, grant)
    assert open_delegation(data).grant == grant
    assert sign_delegation(OWNER, grant) == data


@pytest.mark.parametrize(
    "change",
    [
        {"node": NODE.public.upper()},
        {"node": 5},
        {"run": "Run"},
        {"run": ""},
        {"not_before_ms": END_MS},
        {"not_before_ms": -1},
        {"not_before_ms": True},
        {"not_after_ms": START_MS + MAX_LIFETIME_MS + 1},
        {"not_after_ms": None},
        {"scopes": []},
        {"scopes": "work"},
        {"scopes": ["work", "validate"]},
        {"scopes": ["work", "work"]},
        {"scopes": ["admin"]},
        {"scopes": [["work"]]},
        {"scopes": ["work", 5]},
        {"max_leases": -1},
        {"max_leases": 4097},
        {"owner": OTHER.public},
    ],
)
def test_a_delegation_of_another_form_is_refused_though_signed(change: dict[str, Any]) -> None:
    with pytest.raises(DocumentError):
        open_delegation(sign_document(OWNER, Tag.DELEGATION, {**BODY, **change}))


@pytest.mark.parametrize("missing", sorted(BODY))
def test_a_delegation_lacks_nothing(missing: str) -> None:
    body = {name: value for name, value in BODY.items() if name != missing}
    with pytest.raises(DocumentError):
        open_delegation(sign_document(OWNER, Tag.DELEGATION, body))


def test_a_lease_is_no_delegation() -> None:
    with pytest.raises(DocumentError):
        open_delegation(sign_document(OWNER, Tag.LEASE, BODY))
    with pytest.raises(DocumentError):
        open_revocation(sign_delegation(OWNER, make_grant()))


@pytest.mark.parametrize(
    ("now_ms", "word"),
    [
        (START_MS - 1, "begins in 1 s"),
        (START_MS - 60_000, "begins in 60 s"),
        (END_MS, "ended 0 s"),
        (END_MS + 9_000, "ended 9 s"),
    ],
)
def test_a_delegation_holds_in_its_time_alone(now_ms: int, word: str) -> None:
    delegation = open_delegation(sign_delegation(OWNER, make_grant()))
    check(delegation, now_ms=END_MS - 1)
    with pytest.raises(ApiError, match=word) as caught:
        check(delegation, now_ms=now_ms)
    assert caught.value.status == 403


def test_a_delegation_is_for_one_node_and_one_run() -> None:
    delegation = open_delegation(sign_delegation(OWNER, make_grant()))
    with pytest.raises(ApiError, match="another node"):
        check(delegation, node=OTHER.public)
    with pytest.raises(ApiError, match="another run"):
        check(delegation, run="run-2")


def test_a_revocation_comes_back_as_it_was_signed() -> None:
    revocation = open_revocation(sign_revocation(OWNER, NODE.public, "run-1"))
    assert revocation == Revocation(OWNER.public, NODE.public, "run-1")


@pytest.mark.parametrize(
    "body", [{}, {"node": NODE.public}, {"node": "x", "run": "r"}, {"node": NODE.public, "run": "R"}]
)
def test_a_revocation_of_another_form_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(DocumentError):
        open_revocation(sign_document(OWNER, Tag.REVOCATION, body))


@given(st.binary(max_size=300))
def test_nothing_else_is_a_delegation(data: bytes) -> None:
    with pytest.raises(DocumentError):
        open_delegation(data)
