"""`shoal node join` and `leave`: join a run as a node without working for it, or leave it.

A node's folder holds node.key, delegation.json (the owner's permission), descriptor.json and address (of the run it
belongs to), head.json and the other documents that the coordinator signed. One folder is one node of one run.
"""

import argparse
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import __version__
from shoal.commands import common
from shoal.commands.common import CliCommand, CommandResult, flag
from shoal.commands.owner import ALLOWANCE, Allowance, make_grant, read_allowance
from shoal.errors import ConfigError
from shoal.util.disk import guard_disk
from shoal.util.files import write_atomic
from shoal.util.units import count_things

if TYPE_CHECKING:
    from shoal.identity.keys import Key
    from shoal.node.client import NodeClient
    from shoal.protocol.descriptor import Descriptor
    from shoal.protocol.messages import MemberInfo

logger = logging.getLogger(__name__)
_FOLDER = flag("--folder", type=Path, default=Path("node"), metavar="DIR", help="folder of the node (%(default)s)")
_JOIN = (
    *common.QUERY,
    _FOLDER,
    flag("--owner", type=Path, metavar="FILE", help="the owner's key, which signs the delegation to this node"),
    flag("--delegation", type=Path, metavar="FILE", help="a delegation signed elsewhere, see `shoal owner delegate`"),
    flag("--coordinator", metavar="HEX", help="public key that the coordinator must have (default: any)"),
    *ALLOWANCE,
)


def run_join(args: argparse.Namespace) -> int:
    """Join a run as a node, or renew; does the proof of work."""
    own = common.pick_flags(args, "owner", "delegation", "coordinator")
    work = join_run(args.where, folder=args.folder, allowance=read_allowance(args), authority=args.ca, **own)
    with guard_disk(args.folder):
        return common.run_query(work, as_json=args.json)


def run_leave(args: argparse.Namespace) -> int:
    """Leave a run and return its leases."""
    with guard_disk(args.folder):
        return common.run_query(leave_run(args.folder, args.ca), as_json=args.json)


async def join_run(
    where: str,
    *,
    folder: Path,
    owner: Path | None = None,
    delegation: Path | None = None,
    coordinator: str | None = None,
    allowance: Allowance | None = None,
    authority: Path | None = None,
) -> CommandResult:
    """Join a run, or renew: with the owner's key, with a delegation from a file, or with the previous delegation."""
    common.check_key("--coordinator", coordinator)
    if owner is not None:
        common.load_key(owner)  # a wrong path is reported now, not when the coordinator answers
    address, descriptor, data = await _find_run(where, authority)
    if coordinator not in (None, descriptor.coordinator):
        raise ConfigError(f"{where}: coordinator key is {descriptor.coordinator}, expected {coordinator}")
    _check_folder(folder, descriptor)
    key = _load_node_key(folder / "node.key")
    document = _find_delegation(key, descriptor.run, folder, owner, delegation, allowance or Allowance())
    async with _open_node(address, key, descriptor, folder, authority) as client:
        await client.check_newest()  # never join a coordinator that showed a different history
        info = await client.join(document, software=f"shoal {__version__}")
        await client.check_newest()
    write_atomic(folder / "delegation.json", document)
    write_atomic(folder / "descriptor.json", data)
    write_atomic(folder / "address", address.encode())
    return CommandResult(0, _describe_member(info, descriptor.coordinator), info.model_dump(mode="json"))


async def leave_run(folder: Path, authority: Path | None = None) -> CommandResult:
    """Leave a run and return its leases."""

    async with open_joined(folder, authority) as (client, descriptor):
        await client.leave()
        node = common.load_key(folder / "node.key").public
    text = f"left run {descriptor.run} as node {node}; `shoal node join` with the same folder rejoins"
    return CommandResult(0, text, {"run": descriptor.run, "node": node})


@asynccontextmanager
async def open_joined(folder: Path, authority: Path | None = None) -> "AsyncIterator[tuple[NodeClient, Descriptor]]":
    """Open the node of a folder; yields its client and its run."""

    if not (folder / "descriptor.json").exists():
        raise ConfigError(f"{folder}: not the folder of a joined node; see `shoal node join`")
    descriptor, _ = common.read_descriptor(folder / "descriptor.json")
    path = folder / "address"
    address = common.read_file(path).decode("ascii", "replace") if path.exists() else descriptor.urls[0]
    key = common.load_key(folder / "node.key")
    async with _open_node(address, key, descriptor, folder, authority) as client:
        yield client, descriptor


@asynccontextmanager
async def _open_node(
    address: str, key: "Key", descriptor: "Descriptor", folder: Path, authority: Path | None
) -> "AsyncIterator[NodeClient]":
    from shoal.net.client import parse_endpoint
    from shoal.net.retry import RetryingClient
    from shoal.node.client import NodeClient

    place, asker = parse_endpoint(address, authority), RetryingClient(common.quick_retries())
    run, coordinator = descriptor.run, descriptor.coordinator
    with closing(NodeClient(place, key, run=run, coordinator=coordinator, folder=folder, asker=asker)) as client:
        yield client


async def _find_run(where: str, authority: Path | None) -> "tuple[str, Descriptor, bytes]":
    """Address, descriptor and its bytes. An address given by the user takes precedence over those in the descriptor."""
    if not common.is_address(where):
        descriptor, data = common.read_descriptor(Path(where))
        return descriptor.urls[0], descriptor, data
    async with common.open_client(where, authority) as client:
        descriptor, data = await common.fetch_descriptor(client)
    return where.rstrip("/"), descriptor, data


def _check_folder(folder: Path, descriptor: "Descriptor") -> None:
    """Create the node's folder; refuse one that belongs to a different run."""
    from shoal.node.known_run import check_same

    path = folder / "descriptor.json"
    if path.exists():
        check_same(descriptor, common.read_descriptor(path)[0], folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _load_node_key(path: Path) -> "Key":
    from shoal.identity.keys import Key

    if not path.exists():
        Key.generate().save(path)
    return Key.load(path)


def _find_delegation(
    key: "Key", run: str, folder: Path, owner: Path | None, delegation: Path | None, allowance: Allowance
) -> bytes:
    """The owner's permission for this node: signed now with the owner's key, from a file, or the previous one."""
    from shoal.identity.delegation import MAX_DOCUMENT_BYTES, open_delegation, sign_delegation
    from shoal.identity.documents import DocumentError
    from shoal.identity.keys import Key

    if owner is not None and delegation is not None:
        raise ConfigError("--owner and --delegation are mutually exclusive")
    if owner is not None:
        return sign_delegation(Key.load(owner), make_grant(key.public, run, allowance))
    path = delegation or folder / "delegation.json"
    if delegation is None and not path.exists():
        raise ConfigError("give --owner (the owner's key) or --delegation (a file from `shoal owner delegate`)")
    document = common.read_file(path, MAX_DOCUMENT_BYTES + 1).rstrip(b"\n")
    try:
        grant = open_delegation(document).grant
    except DocumentError as error:
        raise ConfigError(f"{path}: invalid delegation ({error})") from None
    if (grant.node, grant.run) != (key.public, run):
        named = f"delegates to node {grant.node} for run {grant.run}"
        raise ConfigError(f"{path}: {named}; expected node {key.public} and run {run}")
    return document


def _describe_member(info: "MemberInfo", coordinator: str) -> str:
    """Describe the membership of a node in its run."""
    lines = [
        f"joined run {info.run}",
        f"  node         {info.node}",
        f"  owner        {info.owner}",
        f"  standing     {info.standing.value}",
        f"  may          {', '.join(info.scopes)}; hold {count_things(info.width, 'lease')} at once",
        f"  heartbeat    every {info.heartbeat_s} s",
        f"  coordinator  {coordinator}",
    ]
    return "\n".join(lines)


_ACTIONS = (
    CliCommand("join", run_join, _JOIN, resumes="; the node may not have joined yet, run the same command again"),
    CliCommand("leave", run_leave, (_FOLDER, common.AUTHORITY, common.JSON)),
)
COMMANDS = (CliCommand("node", text="join a run without working for it yet, or leave it", actions=_ACTIONS),)
