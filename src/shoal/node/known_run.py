"""The run that a node works for, and the keys it trusts: the descriptor, pinned at the first start.

    <folder>/descriptor.json    the signed descriptor of the first start, or a newer one of the same run and keys

A descriptor fetched from an address is as trustworthy as the connection (trust on first use). Users that have the
descriptor file from a trusted source pass that file instead, or the coordinator's public key, which must match the
descriptor. Its key must also sign the answer that carries it (`fetch_run`), so an intermediary cannot send one of the
run's earlier descriptors, which may name addresses and stores that the run no longer uses. Afterwards a different run,
coordinator, operator or first event in the same folder is refused: it would be a different swarm in place of the one
that the node's receipts and head belong to.
"""

from contextlib import closing
from pathlib import Path

from shoal.errors import ConfigError, UnreachableError
from shoal.identity.documents import DocumentError
from shoal.net.client import parse_endpoint
from shoal.net.retry import RefusedError, RetryingClient, RetryPolicy
from shoal.node.public_client import PublicClient
from shoal.protocol.descriptor import MAX_DESCRIPTOR_BYTES, Descriptor, open_descriptor
from shoal.util.files import write_atomic
from shoal.util.waits import RoleWaits, WaitError

_NAME = "descriptor.json"
_RETRY_POLICY = RetryPolicy(tries=6, first_s=0.5, longest_s=5.0)
_NO_RETRY = RetryPolicy(tries=1, first_s=0.5, longest_s=0.5)
"""of a node that waits for its first answer: the wait itself repeats the call, and logs each failure"""
_FETCH_S = 60.0
_PINNED = ("run", "coordinator", "operator", "genesis")


async def find_run(
    source: str, folder: Path, waits: RoleWaits, *, coordinator: str | None = None, authority: Path | None = None
) -> tuple[Descriptor, str]:
    """The run's descriptor and the coordinator's address, from an address or a descriptor file.

    A node that has joined before starts with its pinned descriptor while the coordinator is unreachable; one that has
    not waits for it.
    `coordinator` is the expected public key, `authority` a file of certificates to trust.
    """
    pinned = _read_pinned(folder / _NAME)
    is_url, is_known = source.startswith(("http://", "https://")), pinned is not None
    try:
        if is_url:
            descriptor, data = await _fetch(source, waits, authority, is_known=is_known)
        else:
            descriptor, data = load_run(Path(source))
    except DocumentError as error:
        raise ConfigError(f"{source}: not a valid run descriptor ({error})") from None
    except (RefusedError, UnreachableError, WaitError) as error:
        if pinned is None:
            raise ConfigError(f"{source}: not a valid run descriptor ({error})") from None
        _check_key(pinned, coordinator, str(folder))
        return pinned, source
    _check_key(descriptor, coordinator, source)
    if pinned is not None:
        check_same(descriptor, pinned, folder)
    if pinned != descriptor:
        write_atomic(folder / _NAME, data)
    return descriptor, source if is_url else descriptor.urls[0]


def load_run(path: Path) -> tuple[Descriptor, bytes]:
    """The descriptor in a file that the user named, and its bytes."""
    data = _read_file(path)
    descriptor = _open(data, str(path))
    if not descriptor.urls:
        raise ConfigError(f"{path}: the descriptor has no coordinator address")
    return descriptor, data


async def fetch_run(client: PublicClient) -> tuple[Descriptor, bytes]:
    """The current descriptor, and its bytes; from then on the client accepts only what its coordinator signs.

    Asked for twice: the first answer names the key, the second is signed with it for this request.
    """
    first = open_descriptor(await client.read_descriptor())
    client.trust(first.run, first.coordinator)
    data = await client.read_descriptor()
    descriptor = open_descriptor(data)
    if (descriptor.run, descriptor.coordinator) != (first.run, first.coordinator):
        raise DocumentError("the coordinator answered with the descriptor of another run")
    return descriptor, data


async def _fetch(source: str, waits: RoleWaits, authority: Path | None, *, is_known: bool) -> tuple[Descriptor, bytes]:
    asker, whom = RetryingClient(_RETRY_POLICY if is_known else _NO_RETRY), "the coordinator"
    with closing(PublicClient(parse_endpoint(source, authority), asker=asker)) as client:
        if is_known:
            return await waits.with_timeout("descriptor", fetch_run(client), waiting_for=whom, timeout_s=_FETCH_S)
        return await waits.retry_forever("descriptor", lambda: fetch_run(client), waiting_for=whom, timeout_s=_FETCH_S)


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_DESCRIPTOR_BYTES + 1).rstrip(b"\n")
    except FileNotFoundError:
        text = f"{path}: cannot be read (no such file); an address begins with http:// or https://"
        raise ConfigError(text) from None
    except IsADirectoryError:
        text = f"{path}: is a folder; give the coordinator's address, or the file descriptor.json of its folder"
        raise ConfigError(text) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def _read_pinned(path: Path) -> Descriptor | None:
    return _open(_read_file(path), str(path)) if path.exists() else None


def _open(data: bytes, source: str) -> Descriptor:
    try:
        return open_descriptor(data)
    except DocumentError as error:
        raise ConfigError(f"{source}: not a valid run descriptor ({error})") from None


def _check_key(found: Descriptor, expected: str | None, source: str) -> None:
    if expected not in (None, found.coordinator):
        raise ConfigError(f"{source}: the coordinator has the key {found.coordinator}, expected {expected}")


def check_same(found: Descriptor, pinned: Descriptor, folder: Path) -> None:
    """Refuse a run other than the one that a node's folder belongs to."""
    for name in _PINNED:
        if getattr(found, name) != getattr(pinned, name):
            raise ConfigError(
                f"{folder}: belongs to run {pinned.run} of coordinator {pinned.coordinator[:16]}..., but this is a "
                f"different run, {found.run} of coordinator {found.coordinator[:16]}... (another {name}); use another "
                "--folder for it"
            )
