"""Which run a node works for, and whose word it takes: the descriptor, believed once and held to from then on.

    <folder>/descriptor.json    the signed descriptor of the first start, or a newer one of the same run and keys

Fetched from an address a descriptor is as good as the way there (trust on first use). Who has the file from a place
they trust gives that instead, or the coordinator's public key, which has to be the one in the descriptor. Afterwards
another run, coordinator, operator or first event under the same folder is refused: it would be another swarm in the
place of the one that the node's receipts and head are about.
"""

from pathlib import Path

from shoal.errors import AwayError, ConfigError
from shoal.files import write_atomic
from shoal.node.waits import RoleWaits, WaitError
from shoal.swarm.asking import Asker, Patience, RefusedError, UnreachableError
from shoal.swarm.descriptor import MAX_DESCRIPTOR_BYTES, Descriptor, open_descriptor
from shoal.swarm.link import parse_place
from shoal.swarm.open_client import OpenClient
from shoal.swarm.tags import DocumentError

_NAME = "descriptor.json"
_PATIENCE = Patience(tries=6, first_s=0.5, longest_s=5.0)
_FETCH_S = 60.0
_PINNED = ("run", "coordinator", "operator", "genesis")


async def find_run(
    source: str, folder: Path, waits: RoleWaits, *, coordinator: str | None = None, authority: Path | None = None
) -> tuple[Descriptor, str]:
    """The run's descriptor and the coordinator's address, from an address or the file of a descriptor.

    A node that was there before starts with the descriptor it holds while the coordinator is away. `coordinator` is the
    key that it must have, `authority` a file of certificates to trust.
    """
    pinned = _read_pinned(folder / _NAME)
    is_url = source.startswith(("http://", "https://"))
    try:
        data = await _fetch(source, waits, authority) if is_url else _read_file(Path(source))
        descriptor = _open(data, source)
    except (RefusedError, UnreachableError, WaitError) as error:
        if pinned is None:
            kind = ConfigError if isinstance(error, RefusedError) else AwayError
            raise kind(f"{source}: gives no descriptor of a run ({error})") from None
        _check_key(pinned, coordinator, str(folder))
        return pinned, source
    _check_key(descriptor, coordinator, source)
    if pinned is not None:
        _check_same(descriptor, pinned, folder)
    if pinned != descriptor:
        write_atomic(folder / _NAME, data)
    if not is_url and not descriptor.urls:
        raise ConfigError(f"{source}: the descriptor names no address of a coordinator")
    return descriptor, source if is_url else descriptor.urls[0]


async def _fetch(source: str, waits: RoleWaits, authority: Path | None) -> bytes:
    client = OpenClient(parse_place(source, authority), asker=Asker(_PATIENCE))
    try:
        return await waits.bound("descriptor", client.read_descriptor(), for_whom="the coordinator", timeout_s=_FETCH_S)
    finally:
        client.close()


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_DESCRIPTOR_BYTES + 1).rstrip(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def _read_pinned(path: Path) -> Descriptor | None:
    return _open(_read_file(path), str(path)) if path.exists() else None


def _open(data: bytes, source: str) -> Descriptor:
    try:
        return open_descriptor(data)
    except DocumentError as error:
        raise ConfigError(f"{source}: gives no descriptor of a run ({error})") from None


def _check_key(found: Descriptor, expected: str | None, source: str) -> None:
    if expected not in (None, found.coordinator):
        raise ConfigError(f"{source}: the coordinator there has the key {found.coordinator}, not {expected}")


def _check_same(found: Descriptor, pinned: Descriptor, folder: Path) -> None:
    for name in _PINNED:
        if getattr(found, name) != getattr(pinned, name):
            raise ConfigError(
                f"{folder}: belongs to run {pinned.run} of coordinator {pinned.coordinator[:16]}..., and what is there "
                f"now has another {name}; if that is meant, choose another folder"
            )
