"""Ed25519 keys of publishers, nodes, owners and operators.

Invariants:
- a public key has one spelling, 64 lower-case hex characters, which is also the id of its node;
- the secret is only in the key file, readable by its owner alone from the first byte on; it is never printed;
- a key file is never overwritten: a lost key cannot be recovered;
- keys under which anyone can sign (points of small order) are rejected;
- `verify_signature` returns False for anything that is not a valid signature, and never raises for input from a peer.
"""

import os
import re
import stat
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from shoal.errors import ConfigError
from shoal.util.files import sync_path

SIGNATURE_BYTES = 64
MAX_KEYS = 16_384
"""public keys cached, least recently used dropped"""
_PUBLIC_CHARS = 64
_PUBLIC = re.compile(r"[0-9a-f]{64}")
_MAX_FILE_BYTES = 4096
_LARGE = (1 << 255) - 19
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER = {0, 1, _LARGE - 1, _LARGE, _LARGE + 1, _ORDER_8, _LARGE - _ORDER_8}
"""y of the points of order 1, 2, 4 and 8, in every spelling: under such a "key" one signature is valid for nearly
every message."""


class Key:
    """A secret key with its public key."""

    __slots__ = ("_secret", "public")

    def __init__(self, secret: Ed25519PrivateKey) -> None:
        self._secret = secret
        self.public = secret.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()

    @classmethod
    def generate(cls) -> "Key":
        """A new key from the system's random source."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> "Key":
        """Read a key from a file that `save` wrote (PKCS #8 PEM, without a password)."""
        data = read_private(path, "key")
        try:
            secret = load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise ConfigError(f"{path}: not an Ed25519 key without a password") from None
        if not isinstance(secret, Ed25519PrivateKey):
            raise ConfigError(f"{path}: key type is not Ed25519")
        return cls(secret)

    @classmethod
    def open(cls, path: Path) -> "Key":
        """The key in a file, which is created if it does not exist."""
        if not path.exists():
            cls.generate().save(path)
        return cls.load(path)

    def save(self, path: Path) -> None:
        """Write the key to a new file that only its owner can read."""
        write_private(path, self._secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    def sign(self, message: bytes) -> bytes:
        """The signature of a message, 64 bytes."""
        return self._secret.sign(message)

    def __repr__(self) -> str:
        return f"Key(public={self.public!r})"


def verify_signature(public: str, message: bytes, signature: bytes) -> bool:
    """Whether the key's owner signed the message."""
    if len(public) != _PUBLIC_CHARS or len(signature) != SIGNATURE_BYTES:
        return False
    key = _load_public(public)
    if key is None:
        return False
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


@lru_cache(maxsize=MAX_KEYS)
def _load_public(public: str) -> Ed25519PublicKey | None:
    """A public key, cached: parsing one costs a fifth of using it. Called with short texts only."""
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(check_public(public)))
    except (ConfigError, ValueError):
        return None


def check_public(text: str) -> str:
    """Validate a public key that the user entered."""
    if not _is_public(text):
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise ConfigError(f"{shown!r}: not a public key (64 characters 0-9 and a-f)")
    return text


def _is_public(text: str) -> bool:
    if _PUBLIC.fullmatch(text) is None:
        return False
    height = int.from_bytes(bytes.fromhex(text), "little") & ((1 << 255) - 1)
    return height not in _SMALL_ORDER


def read_private(path: Path, what: str) -> bytes:
    """The bytes of a file that only its owner can read."""
    try:
        # Non-blocking: opening a pipe in place of the file would wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path}: not a regular file")
            if status.st_mode & 0o077:
                raise ConfigError(f"{path}: this {what} is readable by others; restrict it with chmod 600")
            return file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only its owner can read, atomically."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        path.hardlink_to(temporary)  # unlike a rename it fails if the path exists
        sync_path(path.parent)
    except FileExistsError:
        raise ConfigError(f"{path}: already exists; a key is never overwritten, choose another path") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        temporary.unlink(missing_ok=True)
