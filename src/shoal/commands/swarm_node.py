"""`shoal join` and `leave`: what nodes do.

A node's folder: node.key, delegation.json (the owner's word), descriptor.json and address (of the run it belongs to),
head.json and what else the coordinator signed. One folder is one node of one run.
"""

import argparse
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shoal import __version__
from shoal.commands.swarm_call import (
    QUICK,
    Outcome,
    fetch_descriptor,
    open_client,
    read_descriptor,
    read_file,
    run_work,
)
from shoal.commands.swarm_owner import Allowance, make_grant, read_allowance
from shoal.commands.swarm_words import describe_member
from shoal.disk import guard_disk
from shoal.errors import ConfigError
from shoal.files import write_atomic
from shoal.keys import Key, check_public
from shoal.swarm.asking import Asker
from shoal.swarm.client import NodeClient
from shoal.swarm.delegation import (
    MAX_DOCUMENT_BYTES,
    open_delegation,
    sign_delegation,
)
from shoal.swarm.descriptor import Descriptor
from shoal.swarm.link import parse_place
from shoal.swarm.tags import DocumentError

_PINNED = ("run", "coordinator", "operator", "genesis")
"""what a folder's first descriptor fixes for good"""


def run_join(args: argparse.Namespace) -> int:
    work = join_run(
        args.where,
        folder=args.data,
        owner=args.owner,
        delegation=args.delegation,
        coordinator=args.coordinator,
        allowance=read_allowance(args),
        authority=args.ca,
    )
    with guard_disk(args.data):
        return run_work(work, as_json=args.json)


def run_leave(args: argparse.Namespace) -> int:
    with guard_disk(args.data):
        return run_work(leave_run(args.data, args.ca), as_json=args.json)


async def join_run(
    where: str,
    *,
    folder: Path,
    owner: Path | None = None,
    delegation: Path | None = None,
    coordinator: str | None = None,
    allowance: Allowance | None = None,
    authority: Path | None = None,
) -> Outcome:
    """Join a run, or renew: with the owner's key, with a delegation that it signed, or with the one joined with."""
    if coordinator is not None:
        check_public(coordinator)
    address, descriptor, data = await _find_run(where, authority)
    if coordinator not in (None, descriptor.coordinator):
        raise ConfigError(f"{where}: the coordinator there has the key {descriptor.coordinator}, not {coordinator}")
    _check_folder(folder, descriptor)
    key = _load_node_key(folder / "node.key")
    document = _find_delegation(key, descriptor.run, folder, owner, delegation, allowance or Allowance())
    async with _open_node(address, key, descriptor, folder, authority) as client:
        await client.check_newest()  # nobody joins a coordinator that has shown another history
        print("doing the work that joining costs ...", file=sys.stderr, flush=True)
        info = await client.join(document, software=f"shoal {__version__}")
        await client.check_newest()
    write_atomic(folder / "delegation.json", document)
    write_atomic(folder / "descriptor.json", data)
    write_atomic(folder / "address", address.encode())
    return Outcome(0, describe_member(info, descriptor.coordinator), info.model_dump(mode="json"))


async def leave_run(folder: Path, authority: Path | None = None) -> Outcome:
    """Leave a run; leases are returned."""
    async with open_joined(folder, authority) as (client, descriptor):
        await client.leave()
        node = Key.load(folder / "node.key").public
    text = f"left run {descriptor.run} as node {node}; `shoal join` with the same folder comes back"
    return Outcome(0, text, {"run": descriptor.run, "node": node})


@asynccontextmanager
async def open_joined(folder: Path, authority: Path | None = None) -> AsyncIterator[tuple[NodeClient, Descriptor]]:
    """The node that a folder holds, and its run."""
    if not (folder / "descriptor.json").exists():
        raise ConfigError(f"{folder}: no folder of a node that joined a run; see `shoal join`")
    descriptor, _ = read_descriptor(folder / "descriptor.json")
    path = folder / "address"
    address = read_file(path).decode("ascii", "replace") if path.exists() else descriptor.urls[0]
    key = Key.load(folder / "node.key")
    async with _open_node(address, key, descriptor, folder, authority) as client:
        yield client, descriptor


@asynccontextmanager
async def _open_node(
    address: str, key: Key, descriptor: Descriptor, folder: Path, authority: Path | None
) -> AsyncIterator[NodeClient]:
    client = NodeClient(
        parse_place(address, authority),
        key,
        run=descriptor.run,
        coordinator=descriptor.coordinator,
        folder=folder,
        asker=Asker(QUICK),
    )
    try:
        yield client
    finally:
        client.close()


async def _find_run(where: str, authority: Path | None) -> tuple[str, Descriptor, bytes]:
    """Address, descriptor and its bytes. Whoever wrote an address is believed more than the descriptor found there."""
    if not where.startswith(("http://", "https://")):
        descriptor, data = read_descriptor(Path(where))
        return descriptor.urls[0], descriptor, data
    async with open_client(where, authority) as client:
        descriptor, data = await fetch_descriptor(client)
    return where.rstrip("/"), descriptor, data


def _check_folder(folder: Path, descriptor: Descriptor) -> None:
    """A folder for the node; refuse one that belongs to another run."""
    path = folder / "descriptor.json"
    if path.exists():
        known, _ = read_descriptor(path)
        changed = [name for name in _PINNED if getattr(known, name) != getattr(descriptor, name)]
        if changed:
            raise ConfigError(
                f"{folder}: a node of run {known.run} of coordinator {known.coordinator}, and what is there now has "
                f"another {changed[0]}; choose another folder if that is meant"
            )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _load_node_key(path: Path) -> Key:
    if not path.exists():
        Key.generate().save(path)
    return Key.load(path)


def _find_delegation(
    key: Key, run: str, folder: Path, owner: Path | None, delegation: Path | None, allowance: Allowance
) -> bytes:
    """The owner's word for this node: made here with the owner's key, as a file, or the one of the last time."""
    if owner is not None and delegation is not None:
        raise ConfigError("--owner and --delegation exclude each other: the owner's key, or what was signed with it")
    if owner is not None:
        return sign_delegation(Key.load(owner), make_grant(key.public, run, allowance))
    path = delegation or folder / "delegation.json"
    if delegation is None and not path.exists():
        raise ConfigError("give --owner, the owner's key, or --delegation, a file made by `shoal delegate`")
    document = read_file(path, MAX_DOCUMENT_BYTES + 1).rstrip(b"\n")
    try:
        grant = open_delegation(document).grant
    except DocumentError as error:
        raise ConfigError(f"{path}: no delegation ({error})") from None
    if (grant.node, grant.run) != (key.public, run):
        raise ConfigError(
            f"{path}: lets node {grant.node} act for run {grant.run}; here are {key.public} and run {run}"
        )
    return document
