"""`shoal admin`: what the operator commands, signed with the operator's key and recorded in the ledger."""

import argparse
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.commands.swarm_call import Outcome, fetch_descriptor, open_client, run_work
from shoal.commands.swarm_settings import explain_params, parse_changes
from shoal.errors import ConfigError
from shoal.keys import Key, check_public
from shoal.swarm.messages import Action, Command, CommandAnswer, SignedCommand, sign_message
from shoal.swarm.open_client import OpenClient
from shoal.swarm.params import RunParams, check_change, dump_params

_ACTIONS = {"redeemed": Action.REDEEM_DONE, "unredeemed": Action.REDEEM_FAILED}
_WRONG = {
    "reason": "--reason: up to 400 characters of ASCII",
    "request": "no request of an owner's, which is 32 of the characters 0-9 and a-f",
}


def run_ban(args: argparse.Namespace) -> int:
    return _run_command(args, target=check_public(args.target), reason=args.reason)


def run_redeemed(args: argparse.Namespace) -> int:
    return _run_command(args, request=args.request, reason=args.reason)


def run_switch(args: argparse.Namespace) -> int:
    return _run_command(args, reason=args.reason)


def run_params(args: argparse.Namespace) -> int:
    if not args.changes:
        return run_work(_show_params(args.where, args.ca), as_json=args.json)
    if args.key is None:
        raise ConfigError("give --key, the operator's, to change parameters; without changes they are shown")
    changes = parse_changes(args.changes)
    return run_work(_change_params(args.where, Key.load(args.key), changes, args.ca), as_json=args.json)


def _run_command(args: argparse.Namespace, *, target: str = "", reason: str = "", request: str = "") -> int:
    action = _ACTIONS.get(args.action) or Action(args.action)
    try:
        command = Command(nonce=make_nonce(), action=action, target=target, reason=reason, request=request)
    except ValidationError as error:
        raise ConfigError(_WRONG.get(str(error.errors()[0]["loc"][0]), str(error))) from None
    return run_work(_send_one(args.where, Key.load(args.key), command, args.ca), as_json=args.json)


async def _send_one(where: str, key: Key, command: Command, authority: Path | None) -> Outcome:
    async with open_client(where, authority) as client:
        answer = await send_command(client, key, command)
    about = f" {command.target}" if command.target else ""
    return Outcome(0, f"{command.action.value}{about}: recorded as event {answer.seq}", answer.model_dump(mode="json"))


async def _show_params(where: str, authority: Path | None) -> Outcome:
    async with open_client(where, authority) as client:
        params = dump_params(await client.read_params())
    lines = [f"{name} = {', '.join(value) if isinstance(value, list) else value}" for name, value in params.items()]
    return Outcome(0, "\n".join(lines), params)


async def _change_params(where: str, key: Key, changes: dict[str, Any], authority: Path | None) -> Outcome:
    async with open_client(where, authority) as client:
        old = await client.read_params()
        new = explain_params({**dump_params(old), **changes})
        check_change(old, new)
        command = Command(nonce=make_nonce(), action=Action.PARAMS, params=dump_params(new))
        answer = await send_command(client, key, command)
    said = ", ".join(_describe_change(name, old, new) for name in changes)
    return Outcome(0, f"params: {said}; recorded as event {answer.seq}", answer.model_dump(mode="json"))


async def send_command(client: OpenClient, key: Key, command: Command) -> CommandAnswer:
    """Send a command; sent twice for a lost answer it is done once, by its nonce."""
    descriptor, _ = await fetch_descriptor(client)
    if key.public != descriptor.operator:
        raise ConfigError(f"not the key of this run's operator, who is {descriptor.operator}")
    signed = SignedCommand(command=command, signature=sign_message(key, descriptor.run, command))
    return await client.bring("/v1/commands", signed, CommandAnswer)


def _describe_change(name: str, old: RunParams, new: RunParams) -> str:
    return f"{name} {getattr(old, name)} -> {getattr(new, name)}"


def make_nonce() -> str:
    """What makes a command one of its own."""
    return os.urandom(16).hex()
