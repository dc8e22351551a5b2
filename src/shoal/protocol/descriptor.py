"""The descriptor of a run: a small signed file from which a new node learns where the run is and which keys to trust.

It is signed by the coordinator's key or the operator's, and contains both. A descriptor from a trusted place, or one
signed by a known key, is sufficient by itself; one fetched from the coordinator is as trustworthy as the connection.

A store is identified by the prefix of its URLs: scheme, host, port, bucket and prefix, up to a slash. Nodes use it over
TLS, or without TLS on the same machine.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any

from shoal.identity.documents import DocumentError, Tag, open_claimed, sign_document
from shoal.identity.keys import Key, check_public
from shoal.net.sockets import is_loopback
from shoal.util.units import check_run

FORMAT = 1
MAX_DESCRIPTOR_BYTES = 8192
MAX_URLS = 8
_LISTS = ("urls", "relays", "stores")
_HASH = re.compile(r"(?:[0-9a-f]{64})?")
_URL = re.compile(r"https?://[A-Za-z0-9.:\[\]-]{1,200}")
_STORE = re.compile(
    r"(?P<origin>(?P<scheme>https?)://(?P<host>[A-Za-z0-9][A-Za-z0-9.-]{0,199}|\[[0-9A-Fa-f:.]{2,40}\])(?::[0-9]{1,5})?)"
    r"/(?:[A-Za-z0-9._~%=+-]{1,200}/){0,8}"
)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where a run is, and its keys and hashes. An empty hash or key is not fixed by the descriptor."""

    run: str
    coordinator: str
    operator: str
    urls: tuple[str, ...]
    """of the coordinator, in the order to try them"""
    genesis: str
    """hash of the ledger's first event"""
    params: str = ""
    """hash of the parameters at the start"""
    publisher: str = ""
    """key that signs the weights"""
    relays: tuple[str, ...] = ()
    model: str = ""
    """hash of the model's configuration"""
    tasks: str = ""
    """hash of the recipe: tasks, sampling, and the inputs of the checks"""
    stores: tuple[str, ...] = ()
    """where nodes may write and read files without going through the coordinator"""

    def __post_init__(self) -> None:
        check_run(self.run)
        check_public(self.coordinator)
        check_public(self.operator)
        if not all(
            _HASH.fullmatch(text) for text in (self.genesis, self.params, self.publisher, self.model, self.tasks)
        ):
            raise ValueError("a hash or key in a descriptor must be 64 lowercase hex digits")
        for urls in (self.urls, self.relays):
            if len(urls) > MAX_URLS or not all(_URL.fullmatch(text) for text in urls):
                raise ValueError(f"a descriptor has at most {MAX_URLS} addresses, of the form http://HOST:PORT")
        if len(self.stores) > MAX_URLS or not all(is_store(text) for text in self.stores):
            raise ValueError(f"a descriptor has at most {MAX_URLS} stores, of the form https://HOST/BUCKET/")


def is_store(text: str) -> bool:
    """Whether a descriptor may contain this store: over TLS, or on the same machine."""
    match = _STORE.fullmatch(text)
    return match is not None and (match["scheme"] == "https" or is_loopback(match["host"]))


def split_store(name: str) -> tuple[str, str]:
    """The origin of a store (scheme, host and port) and its host."""
    match = _STORE.fullmatch(name)
    assert match is not None, "the descriptor checked it"
    return match["origin"], match["host"]


def blob_path(blob: str) -> str:
    """The path of a blob in its store. Both sides know it, so a URL with any other path is never used."""
    return f"{blob[:2]}/{blob}"


def incoming_path(blob: str, size: int) -> str:
    """The path to which a node uploads a blob without going through the coordinator."""
    return f"incoming/{blob}.{size}"


def sign_descriptor(key: Key, descriptor: Descriptor) -> bytes:
    """Sign as the coordinator or the operator."""
    body = asdict(descriptor) | {"format": FORMAT, **{name: list(getattr(descriptor, name)) for name in _LISTS}}
    return sign_document(key, Tag.DESCRIPTOR, body)


def open_descriptor(data: bytes) -> Descriptor:
    """A descriptor signed by one of the keys it names; `DocumentError` for anything else."""
    signer, body = open_claimed(Tag.DESCRIPTOR, data, max_bytes=MAX_DESCRIPTOR_BYTES)
    if body.pop("format", None) != FORMAT:
        raise DocumentError("unsupported descriptor format")
    try:
        descriptor = Descriptor(**_check_types(body))
    except (TypeError, ValueError) as error:
        raise DocumentError(f"invalid descriptor ({error})") from None
    if signer not in (descriptor.coordinator, descriptor.operator):
        raise DocumentError("descriptor is not signed by either of the keys it names")
    return descriptor


def _check_types(body: dict[str, object]) -> dict[str, Any]:
    """Check that all fields are strings or lists of strings; convert lists to tuples."""
    values: dict[str, Any] = {}
    for name, value in body.items():
        is_list = name in _LISTS
        items = value if isinstance(value, list) else [value]
        if isinstance(value, list) != is_list or not all(isinstance(item, str) for item in items):
            raise ValueError(f"{name} has the wrong type")
        values[name] = tuple(items) if is_list else value
    return values
