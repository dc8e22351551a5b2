"""The descriptor of a run: a small signed file with which a stranger finds it and knows whom to believe.

It is signed by the coordinator's key or the operator's, both of which it names. Whoever has it from a place they trust,
or knows one of the two keys, needs nothing else; fetched from the coordinator itself it is as good as the way there.

A store is named by what its URLs begin with: scheme, host, port, bucket and prefix, up to a slash. Nodes use it by TLS,
or on this machine without.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any

from shoal.keys import Key, check_public
from shoal.runname import check_run
from shoal.swarm.hosts import is_loopback
from shoal.swarm.tags import DocumentError, Tag, open_claimed, sign_document

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
    """Where a run is, and by which keys and hashes it is known. An empty hash or key: not fixed by the descriptor."""

    run: str
    coordinator: str
    operator: str
    urls: tuple[str, ...]
    """of the coordinator, in the order to try"""
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
    """hash of the recipe: tasks, sampling, and what the checks go by"""
    stores: tuple[str, ...] = ()
    """where nodes may put and read files past the coordinator"""

    def __post_init__(self) -> None:
        check_run(self.run)
        check_public(self.coordinator)
        check_public(self.operator)
        if not all(
            _HASH.fullmatch(text) for text in (self.genesis, self.params, self.publisher, self.model, self.tasks)
        ):
            raise ValueError("a hash or key of a descriptor has 64 of the characters 0-9 and a-f")
        for urls in (self.urls, self.relays):
            if len(urls) > MAX_URLS or not all(_URL.fullmatch(text) for text in urls):
                raise ValueError(f"a descriptor has up to {MAX_URLS} addresses, as http://HOST:PORT")
        if len(self.stores) > MAX_URLS or not all(is_store(text) for text in self.stores):
            raise ValueError(f"a descriptor has up to {MAX_URLS} stores, as https://HOST/BUCKET/")


def is_store(text: str) -> bool:
    """Whether a descriptor may name a store so: by TLS, or on this machine."""
    match = _STORE.fullmatch(text)
    return match is not None and (match["scheme"] == "https" or is_loopback(match["host"]))


def split_store(name: str) -> tuple[str, str]:
    """The origin of a store (scheme, host and port) and its host."""
    match = _STORE.fullmatch(name)
    assert match is not None, "it was checked with its descriptor"
    return match["origin"], match["host"]


def sign_descriptor(key: Key, descriptor: Descriptor) -> bytes:
    """Sign as the coordinator or the operator."""
    body = asdict(descriptor) | {"format": FORMAT, **{name: list(getattr(descriptor, name)) for name in _LISTS}}
    return sign_document(key, Tag.DESCRIPTOR, body)


def open_descriptor(data: bytes) -> Descriptor:
    """A descriptor signed by one of the keys it names; `DocumentError` for anything else."""
    signer, body = open_claimed(Tag.DESCRIPTOR, data, max_bytes=MAX_DESCRIPTOR_BYTES)
    if body.pop("format", None) != FORMAT:
        raise DocumentError("a descriptor of another format")
    try:
        descriptor = Descriptor(**_check_types(body))
    except (TypeError, ValueError) as error:
        raise DocumentError(f"not a descriptor ({error})") from None
    if signer not in (descriptor.coordinator, descriptor.operator):
        raise DocumentError("a descriptor signed by neither of its own keys")
    return descriptor


def _check_types(body: dict[str, object]) -> dict[str, Any]:
    """Texts, and lists of texts, which become tuples."""
    values: dict[str, Any] = {}
    for name, value in body.items():
        is_list = name in _LISTS
        items = value if isinstance(value, list) else [value]
        if isinstance(value, list) != is_list or not all(isinstance(item, str) for item in items):
            raise ValueError(f"{name} is of another kind")
        values[name] = tuple(items) if is_list else value
    return values
