"""`shoal owner key`, `show`, `delegate`, `revoke`, `appeal`, `redeem` and `unbond`: an owner's key, its credit, and the
statements that it signs."""

import argparse
import os
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from shoal.commands import common
from shoal.commands.common import CliCommand, CommandResult, flag
from shoal.errors import ConfigError
from shoal.util.clock import read_clock, show_time
from shoal.util.files import write_output

if TYPE_CHECKING:
    from pydantic import BaseModel

    from shoal.identity.delegation import Grant
    from shoal.protocol.messages import OwnerAccount, Signable

T = TypeVar("T")
Answer = TypeVar("Answer", bound="BaseModel")
DAY_MS = 86_400_000
_CREDITS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?")
SCOPES = ("work", "validate", "train", "relay")
_WRONG = {
    "request": "--request: expected 32 hex characters (0-9, a-f)",
    "amount": "the amount must be 0.000001 credits or more",
    "goal": "--to: up to 400 characters of ASCII",
}


class Allowance(NamedTuple):
    """What an owner allows a node, from the flags."""

    scopes: tuple[str, ...] = ("work",)
    days: int = 30
    leases: int = 16


ALLOWANCE = (
    flag("--scope", action="append", choices=SCOPES, help="what the node may do; repeatable (default: work)"),
    flag("--days", type=int, default=30, metavar="N", help="days until it expires (%(default)s)"),
    flag("--leases", type=int, default=16, metavar="N", help="maximum number of concurrent leases (%(default)s)"),
)
"""flags of what an owner allows"""
_NODE = flag("node", metavar="NODE", help="public key of the node")
_DELEGATE = (
    _NODE,
    flag("--owner", type=Path, required=True, metavar="FILE", help="the owner's key, see `shoal keygen`"),
    flag("--run", required=True, metavar="NAME", help="name of the run"),
    *ALLOWANCE,
    flag("--out", type=Path, metavar="FILE", help="file to write (default: stdout)"),
)
_OWNER = (*common.QUERY, flag("--owner", type=Path, required=True, metavar="FILE", help="the owner's key"))
_UNBOND = (
    *_OWNER,
    flag("--request", metavar="HEX", help="id of an earlier request, to query its state (default: a new request)"),
)
_REDEEM = (
    *_UNBOND,
    flag("amount", metavar="AMOUNT", help="in credits, e.g. 0.5"),
    flag("--to", default="", metavar="TEXT", help="where to pay; read by the operator"),
)


def run_key(args: argparse.Namespace) -> int:
    """Print the public key of a key file."""
    print(common.load_key(args.file).public)
    return 0


async def _show(args: argparse.Namespace) -> CommandResult:
    """Show an owner's record, bond, pending and free credit."""
    owner = common.load_key(args.owner).public
    if Path(args.where).is_dir():
        from shoal.coordinator.status import read_account

        with common.open_folder(args.where) as connection:
            account = read_account(connection, owner)
        if account is None:
            return CommandResult(common.EXIT_REFUSED, f"no node of owner {owner} has joined this run")
    else:
        async with common.open_client(args.where, args.ca) as client:
            account = await client.read_account(owner)
    return CommandResult(0, describe_account(account), account.model_dump(mode="json"))


def describe_account(account: "OwnerAccount") -> str:
    """The record and the credit of an owner, one line each."""
    from shoal.ledger.event import MICRO

    rows = (
        ("earned", account.earned, "by all accepted work"),
        ("bond", account.stake, "burned by a conviction; `shoal owner unbond` returns it"),
        ("unbonding", account.unbond, "a bond being returned"),
        ("pending", account.pending, "becomes free after the challenge window"),
        ("free", account.avail, "`shoal owner redeem` asks for its payment"),
        ("redeeming", account.redeeming, "requested, not paid out yet"),
    )
    lines = [f"  {name:<12} {amount / MICRO:>14.6f}  {meaning}" for name, amount, meaning in rows]
    record = f"standing {account.standing.value}, {account.accepted} accepted, {account.rejected} rejected"
    return "\n".join([f"owner {account.owner}: {record}", *lines])


def run_delegate(args: argparse.Namespace) -> int:
    """Sign what a node may do for a run, and until when."""
    from shoal.identity.delegation import sign_delegation
    from shoal.identity.keys import check_public

    grant = make_grant(check_public(args.node), args.run, read_allowance(args))
    document = sign_delegation(common.load_key(args.owner), grant)
    if args.out is None:
        print(document.decode())
    else:
        write_output(args.out, document + b"\n")
        print(f"delegation to {grant.node} written to {args.out}", file=sys.stderr)
    return 0


def make_grant(node: str, run: str, allowance: Allowance) -> "Grant":
    """The grant for a node, valid from now."""
    from shoal.identity.delegation import Grant, Scope

    now_ms = read_clock()
    # Valid from one day ago: the coordinator's clock may be behind ours.
    start_ms, end_ms = now_ms - DAY_MS, now_ms + allowance.days * DAY_MS
    try:
        return Grant(node, run, start_ms, end_ms, frozenset(map(Scope, allowance.scopes)), allowance.leases)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def read_allowance(args: argparse.Namespace) -> Allowance:
    """Read the allowance from the flags."""
    from shoal.identity.delegation import MAX_LIFETIME_MS

    max_days = MAX_LIFETIME_MS // DAY_MS - 1
    if not 1 <= args.days <= max_days:
        raise ConfigError(f"--days: must be from 1 to {max_days}")
    return Allowance(tuple(args.scope or ("work",)), args.days, args.leases)


async def _revoke(args: argparse.Namespace) -> CommandResult:
    """Revoke all delegations to a node."""
    from shoal.identity.delegation import sign_revocation
    from shoal.identity.keys import check_public
    from shoal.protocol.messages import Done, RevokeRequest

    node, owner = check_public(args.node), common.load_key(args.owner)
    async with common.open_client(args.where, args.ca) as client:
        run = (await common.fetch_descriptor(client))[0].run
        document = sign_revocation(owner, node, run)
        await client.bring("/v1/revocations", RevokeRequest(revocation=document.decode()), Done)
    text = f"node {node} no longer acts for owner {owner.public} in run {run}"
    return CommandResult(0, text, {"run": run, "node": node, "owner": owner.public})


async def _appeal(args: argparse.Namespace) -> CommandResult:
    """Appeal against the rejection of a submission."""
    from shoal.ledger.event import show_credit
    from shoal.protocol.messages import AppealAnswer, AppealStatement, SignedAppeal, describe_appeal

    appeal = AppealStatement(submission=common.check_submission(args.submission))
    answer = await _send(args, "/v1/appeals", appeal, partial(SignedAppeal, appeal=appeal), AppealAnswer)
    fee = f"; its fee is {show_credit(answer.fee)}" if answer.fee else ""
    text = f"{answer.submission}: {describe_appeal(answer.state)}{fee}"
    return CommandResult(0, text, answer.model_dump(mode="json"))


async def _redeem(args: argparse.Namespace) -> CommandResult:
    """Request payment of free credit."""
    from shoal.ledger.event import show_credit
    from shoal.protocol.messages import RedeemAnswer, RedeemStatement, SignedRedeem

    amount = parse_credit(args.amount)
    redeem = make_statement(RedeemStatement, _WRONG, request=_request(args), amount=amount, goal=args.to)
    answer = await _send(args, "/v1/redeems", redeem, partial(SignedRedeem, redeem=redeem), RedeemAnswer)
    text = f"the request {answer.request} for {show_credit(answer.amount)} is {answer.state}, event {answer.seq}"
    return CommandResult(0, text, answer.model_dump(mode="json"))


async def _unbond(args: argparse.Namespace) -> CommandResult:
    """Start the return of the bond."""
    from shoal.ledger.event import show_credit
    from shoal.protocol.messages import SignedUnbond, UnbondAnswer, UnbondStatement

    unbond = make_statement(UnbondStatement, _WRONG, request=_request(args))
    answer = await _send(args, "/v1/unbonds", unbond, partial(SignedUnbond, unbond=unbond), UnbondAnswer)
    free = show_time(answer.free_ms)
    text = f"the bond of {show_credit(answer.amount)} is free on {free}, request {answer.request}"
    return CommandResult(0, text, answer.model_dump(mode="json"))


def parse_credit(text: str) -> int:
    """The amount in micro-credits of a number of credits."""
    from shoal.ledger.event import MICRO

    if _CREDITS.fullmatch(text) is None:
        raise ConfigError(f"invalid amount {text[:40]!r}, expected credits with up to six decimals, e.g. 0.5")
    return int(Decimal(text) * MICRO)


def make_statement(model: type[T], sentences: dict[str, str], **fields: Any) -> T:
    """Build a message from flags; `sentences` maps a field to the error text for an invalid value."""
    from pydantic import ValidationError

    try:
        return model(**fields)
    except ValidationError as error:
        raise ConfigError(sentences.get(str(error.errors()[0]["loc"][0]), str(error))) from None


def _request(args: argparse.Namespace) -> str:
    return args.request or os.urandom(16).hex()


async def _send(
    args: argparse.Namespace, path: str, statement: "Signable", sign: "Callable[..., BaseModel]", answer: type[Answer]
) -> Answer:
    """Send a statement with its owner and the owner's signature for the run."""
    from shoal.protocol.messages import sign_message

    owner = common.load_key(args.owner)
    async with common.open_client(args.where, args.ca) as client:
        descriptor, _ = await common.fetch_descriptor(client)
        signed = sign(owner=owner.public, signature=sign_message(owner, descriptor.run, statement))
        return await client.bring(path, signed, answer)


_ACTIONS = (
    CliCommand("key", run_key, (flag("file", type=Path, metavar="FILE", help="file of an owner's or a node's key"),)),
    CliCommand("show", _show, _OWNER),
    CliCommand("delegate", run_delegate, _DELEGATE),
    CliCommand("revoke", _revoke, (*_OWNER, _NODE)),
    CliCommand("appeal", _appeal, (*_OWNER, common.SUBMISSION)),
    CliCommand("redeem", _redeem, _REDEEM),
    CliCommand("unbond", _unbond, _UNBOND),
)
COMMANDS = (CliCommand("owner", text="act as an owner of nodes, with the owner's key", actions=_ACTIONS),)
