"""`shoal admin`: operator commands, signed with the operator's key and recorded in the ledger."""

import argparse
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.commands.common import QUERY, CliCommand, CommandResult, fetch_descriptor, flag, load_key, open_client
from shoal.commands.owner import make_statement
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.identity.keys import Key
    from shoal.node.public_client import PublicClient
    from shoal.protocol import messages

_PREFIX = re.compile("[0-9a-f]{8,63}")
_WRONG = {
    "reason": "--reason: up to 400 characters of ASCII",
    "request": "invalid redemption request id: expected 32 hex characters (0-9, a-f)",
}


_AFTER = {"unban": "; its processes ended with exit code 3: start them again (under `shoal run`: stop and resume it)"}


async def _params(args: argparse.Namespace) -> CommandResult:
    """Show the run's parameters, or change some of them."""
    if args.inputs and args.key is None:
        raise ConfigError("changing parameters needs --key with the operator's key; without changes they are shown")
    return await (_change_params(args) if args.inputs else _show_params(args))


async def _act(action: str, args: argparse.Namespace) -> CommandResult:
    from shoal.protocol.messages import Action, Command

    async with open_client(args.where, args.ca) as client:
        target = await find_target(client, args.target) if "target" in args else ""
        own = {"target": target, "reason": args.reason, "request": getattr(args, "request", "")}
        command = make_statement(Command, _WRONG, nonce=make_nonce(), action=Action(action), **own)
        answer = await send_command(client, load_key(args.key), command)
    about = f" {target}" if target else ""
    text = f"{action}{about}: recorded as event {answer.seq}{_AFTER.get(action, '')}"
    return CommandResult(0, text, answer.model_dump(mode="json"))


async def find_target(client: "PublicClient", text: str) -> str:
    """The key of an owner or node by its first digits. The operator signs the whole key, which is shown."""
    from shoal.identity.keys import check_public

    if not _PREFIX.fullmatch(text):
        try:
            return check_public(text)
        except ConfigError as error:
            raise ConfigError(f"{error}; its first 8 characters or more suffice") from None
    owners = (await client.find_key(text)).owners
    keys = [key for owner in owners for key in (owner.owner, *(node.node for node in owner.nodes))]
    found = sorted({key for key in keys if key.startswith(text)})
    if len(found) == 1:
        return check_public(found[0])
    if found:
        raise ConfigError(f"{text}: several keys begin with it, give more digits: {', '.join(found)}")
    raise ConfigError(f"{text}: no owner and no node of this run has a key that begins with it")


async def _show_params(args: argparse.Namespace) -> CommandResult:
    from shoal.protocol.params import dump_params

    async with open_client(args.where, args.ca) as client:
        params = dump_params(await client.read_params())
    return CommandResult(0, describe_params(params), params)


def describe_params(params: "dict[str, Any]") -> str:
    """The parameters of a run in groups, with their units and meanings."""
    from shoal.protocol.params import PARAM_GROUPS, RunParams, name_unit

    lines = []
    for group, names in PARAM_GROUPS.items():
        lines += ["", f"{group}:"]
        for name in names:
            shown = f"{_show_param(params[name])} {name_unit(name)}".strip()
            meaning = " ".join((RunParams.model_fields[name].description or "").split())
            lines.append(f"  {name} = {shown}" + (f"  ({meaning})" if meaning else ""))
    return "\n".join(lines[1:])


def _show_param(value: Any) -> str:
    return (", ".join(value) or "none") if isinstance(value, list) else str(value)


async def _change_params(args: argparse.Namespace) -> CommandResult:
    from shoal.coordinator.run import build_params, parse_changes
    from shoal.protocol.messages import Action, Command
    from shoal.protocol.params import check_change, dump_params

    key, changes = load_key(args.key), parse_changes(args.inputs)
    async with open_client(args.where, args.ca) as client:
        old = await client.read_params()
        new = build_params({**dump_params(old), **changes})
        check_change(old, new)
        command = Command(nonce=make_nonce(), action=Action.PARAMS, params=dump_params(new))
        answer = await send_command(client, key, command)
    before, after = dump_params(old), dump_params(new)
    changed = ", ".join(f"{name} {_show_param(before[name])} -> {_show_param(after[name])}" for name in changes)
    return CommandResult(0, f"params: {changed}; recorded as event {answer.seq}", answer.model_dump(mode="json"))


async def send_command(client: "PublicClient", key: "Key", command: "messages.Command") -> "messages.CommandAnswer":
    """Send a command. Sending it again after a lost response has no further effect: the nonce identifies it."""
    from shoal.protocol.messages import CommandAnswer, SignedCommand, sign_message

    descriptor, _ = await fetch_descriptor(client)
    if key.public != descriptor.operator:
        raise ConfigError(f"wrong key: the operator of this run is {descriptor.operator}")
    signed = SignedCommand(command=command, signature=sign_message(key, descriptor.run, command))
    return await client.bring("/v1/commands", signed, CommandAnswer)


def make_nonce() -> str:
    """Random id that makes a command unique."""
    return os.urandom(16).hex()


_PAID, _UNPAID = "record that a redemption request was paid out", "record that a redemption request could not be paid"
_ABOUT = "send the coordinator an operator command"
_ACTION = (
    *QUERY,
    flag("--key", type=Path, required=True, metavar="FILE", help="the operator's key"),
    flag("--reason", default="", metavar="TEXT", help="reason to record in the ledger"),
)
_BAN = (
    *_ACTION,
    flag("target", metavar="KEY", help="public key of the owner or node, or its first 8 digits or more"),
)
_REDEEM = (*_ACTION, flag("request", metavar="REQUEST", help="id of the owner's redemption request, 32 hex characters"))
_PARAMS = (
    *QUERY,
    flag(
        "inputs",
        nargs="*",
        default=[],
        metavar="name=value",
        help="parameters to change, e.g. price=2 (default: show all)",
    ),
    flag("--key", type=Path, metavar="FILE", help="the operator's key"),
)
_ACTIONS = (
    CliCommand("ban", partial(_act, "ban"), _BAN, text="ban an owner or a node"),
    CliCommand("unban", partial(_act, "unban"), _BAN, text="unban an owner or a node"),
    CliCommand("stop", partial(_act, "stop"), _ACTION, text="stop granting leases"),
    CliCommand("resume", partial(_act, "resume"), _ACTION, text="resume granting leases"),
    CliCommand("redeemed", partial(_act, "redeem_done"), _REDEEM, text=_PAID),
    CliCommand("unredeemed", partial(_act, "redeem_failed"), _REDEEM, text=_UNPAID),
    CliCommand("params", _params, _PARAMS),
)
COMMANDS = (CliCommand("admin", text=_ABOUT, actions=_ACTIONS),)
