"""`shoal delegate`, `revoke`, `appeal`, `redeem` and `unbond`: what owners say, signed with their key."""

import argparse
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from shoal.commands.swarm_call import Outcome, fetch_descriptor, open_client, run_work
from shoal.errors import ConfigError
from shoal.files import write_output
from shoal.keys import Key, check_public
from shoal.swarm.api.answers import Done
from shoal.swarm.clock import read_clock, show_time
from shoal.swarm.delegation import MAX_LIFETIME_MS, Grant, Scope, sign_delegation, sign_revocation
from shoal.swarm.messages import (
    AppealAnswer,
    AppealStatement,
    RedeemAnswer,
    RedeemStatement,
    RevokeRequest,
    SignedAppeal,
    SignedRedeem,
    SignedUnbond,
    UnbondAnswer,
    UnbondStatement,
    sign_message,
)
from shoal.swarm.messages.signing import Signable
from shoal.swarm.open_client import OpenClient

DAY_MS = 86_400_000
MAX_DAYS = MAX_LIFETIME_MS // DAY_MS - 1
_WRONG = {
    "request": "--request: 32 of the characters 0-9 and a-f",
    "amount": "an amount is 1 micro-credit or more",
    "goal": "--to: up to 400 characters of ASCII",
}


class Allowance(NamedTuple):
    """What an owner allows a node, as flags say it."""

    scopes: tuple[str, ...] = ("work",)
    days: int = 30
    leases: int = 16


def run_delegate(args: argparse.Namespace) -> int:
    grant = make_grant(check_public(args.node), args.run, read_allowance(args))
    document = sign_delegation(Key.load(args.owner), grant)
    if args.out is None:
        print(document.decode())
    else:
        write_output(args.out, document + b"\n")
        print(f"delegation to {grant.node} written to {args.out}", file=sys.stderr)
    return 0


def run_revoke(args: argparse.Namespace) -> int:
    node = check_public(args.node)
    return run_work(_revoke_node(args.where, Key.load(args.owner), node, args.ca), as_json=args.json)


def run_appeal(args: argparse.Namespace) -> int:
    return run_work(_appeal(args.where, Key.load(args.owner), args.submission, args.ca), as_json=args.json)


def run_redeem(args: argparse.Namespace) -> int:
    try:
        redeem = RedeemStatement(request=args.request or os.urandom(16).hex(), amount=args.amount, goal=args.to)
    except ValidationError as error:
        raise ConfigError(_WRONG[str(error.errors()[0]["loc"][0])]) from None
    return run_work(_redeem(args.where, Key.load(args.owner), redeem, args.ca), as_json=args.json)


def run_unbond(args: argparse.Namespace) -> int:
    try:
        unbond = UnbondStatement(request=args.request or os.urandom(16).hex())
    except ValidationError:
        raise ConfigError(_WRONG["request"]) from None
    return run_work(_unbond(args.where, Key.load(args.owner), unbond, args.ca), as_json=args.json)


def make_grant(node: str, run: str, allowance: Allowance) -> Grant:
    """What is delegated to a node from now on."""
    now_ms = read_clock()
    try:
        # From a day ago on: the coordinator's clock may be behind ours.
        return Grant(
            node,
            run,
            now_ms - DAY_MS,
            now_ms + allowance.days * DAY_MS,
            frozenset(map(Scope, allowance.scopes)),
            allowance.leases,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def read_allowance(args: argparse.Namespace) -> Allowance:
    """What the flags allow."""
    if not 1 <= args.days <= MAX_DAYS:
        raise ConfigError(f"--days: must be from 1 to {MAX_DAYS}")
    return Allowance(tuple(args.scope or ("work",)), args.days, args.leases)


async def _revoke_node(where: str, owner: Key, node: str, authority: Path | None) -> Outcome:
    async with open_client(where, authority) as client:
        descriptor, _ = await fetch_descriptor(client)
        document = sign_revocation(owner, node, descriptor.run)
        await client.bring("/v1/revocations", RevokeRequest(revocation=document.decode()), Done)
    text = f"node {node} acts for owner {owner.public} in run {descriptor.run} no more"
    return Outcome(0, text, {"run": descriptor.run, "node": node, "owner": owner.public})


async def _appeal(where: str, owner: Key, submission: str, authority: Path | None) -> Outcome:
    try:
        appeal = AppealStatement(submission=submission)
    except ValueError:
        raise ConfigError(f"{submission[:40]!r}: no id of a submission, which is s and a number") from None
    async with _sign(where, owner, appeal, authority) as (client, signature):
        signed = SignedAppeal(appeal=appeal, owner=owner.public, signature=signature)
        answer = await client.bring("/v1/appeals", signed, AppealAnswer)
    text = f"the appeal of {answer.submission} is {answer.state}; its fee is {answer.fee} micro-credits"
    return Outcome(0, text, answer.model_dump(mode="json"))


async def _redeem(where: str, owner: Key, redeem: RedeemStatement, authority: Path | None) -> Outcome:
    async with _sign(where, owner, redeem, authority) as (client, signature):
        signed = SignedRedeem(redeem=redeem, owner=owner.public, signature=signature)
        answer = await client.bring("/v1/redeems", signed, RedeemAnswer)
    text = f"the request {answer.request} for {answer.amount} micro-credits is {answer.state}, event {answer.seq}"
    return Outcome(0, text, answer.model_dump(mode="json"))


async def _unbond(where: str, owner: Key, unbond: UnbondStatement, authority: Path | None) -> Outcome:
    async with _sign(where, owner, unbond, authority) as (client, signature):
        signed = SignedUnbond(unbond=unbond, owner=owner.public, signature=signature)
        answer = await client.bring("/v1/unbonds", signed, UnbondAnswer)
    text = f"the bond of {answer.amount} micro-credits is free on {show_time(answer.free_ms)}, request {answer.request}"
    return Outcome(0, text, answer.model_dump(mode="json"))


@asynccontextmanager
async def _sign(
    where: str, owner: Key, said: Signable, authority: Path | None
) -> AsyncIterator[tuple[OpenClient, str]]:
    """Who to bring a statement to, and its owner's signature for that run."""
    async with open_client(where, authority) as client:
        descriptor, _ = await fetch_descriptor(client)
        yield client, sign_message(owner, descriptor.run, said)
