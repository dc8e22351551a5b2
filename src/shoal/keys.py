"""Ed25519 keys: who publishes, who works, who signs.

Invariants:
- a public key has one spelling, 64 lower-case hex characters, which is also the id of its node;
- the secret is in the key's file alone, readable by its owner only from the first byte on; no text of ours shows it;
- a key file is never overwritten: a lost key cannot be made again;
- no key is one under which everybody can sign;
- `verify_signature` answers False to whatever is no signature, and raises for nothing that a peer can send.
"""

import os
import re
import stat
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
from shoal.files import sync_dir

SIGNATURE_BYTES = 64
_PUBLIC = re.compile(r"[0-9a-f]{64}")
_MAX_FILE_BYTES = 4096
_LARGE = (1 << 255) - 19
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER = {0, 1, _LARGE - 1, _LARGE, _LARGE + 1, _ORDER_8, _LARGE - _ORDER_8}
"""y of the points of order 1, 2, 4 and 8, in every spelling: under such a "key" one signature fits nearly every
message."""


class Key:
    """A secret key, and the public one that belongs to it."""

    __slots__ = ("_secret", "public")

    def __init__(self, secret: Ed25519PrivateKey) -> None:
        self._secret = secret
        self.public = secret.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()

    @classmethod
    def generate(cls) -> "Key":
        """A new key from the system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> "Key":
        """The key in a file that `save` wrote (PKCS #8 PEM, without a password)."""
        data = _read_secret(path)
        try:
            secret = load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise ConfigError(f"{path}: holds no Ed25519 key without a password") from None
        if not isinstance(secret, Ed25519PrivateKey):
            raise ConfigError(f"{path}: holds a key of another kind than Ed25519")
        return cls(secret)

    def save(self, path: Path) -> None:
        """Write the key to a new file that only its owner may read."""
        data = self._secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
        try:
            _write_private(temporary, data)
            path.hardlink_to(temporary)  # unlike a rename it fails where something is
            sync_dir(path.parent)
        except FileExistsError:
            raise ConfigError(f"{path}: exists already; a key is never overwritten, choose another path") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error
        finally:
            temporary.unlink(missing_ok=True)

    def sign(self, message: bytes) -> bytes:
        """The signature of a message, 64 bytes."""
        return self._secret.sign(message)

    def __repr__(self) -> str:
        return f"Key(public={self.public!r})"


def verify_signature(public: str, message: bytes, signature: bytes) -> bool:
    """Whether the key's owner signed the message."""
    if not _is_public(public) or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def check_public(text: str) -> str:
    """A public key as the user wrote it."""
    if not _is_public(text):
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise ConfigError(f"{shown!r}: not a public key, which is 64 of the characters 0-9 and a-f")
    return text


def _is_public(text: str) -> bool:
    if _PUBLIC.fullmatch(text) is None:
        return False
    height = int.from_bytes(bytes.fromhex(text), "little") & ((1 << 255) - 1)
    return height not in _SMALL_ORDER


def _read_secret(path: Path) -> bytes:
    try:
        # Without waiting: a pipe in the place of the file would have us wait for its writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path}: is not a file")
            if status.st_mode & 0o077:
                raise ConfigError(f"{path}: a key that others may read; make it yours alone with chmod 600")
            return file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def _write_private(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)
