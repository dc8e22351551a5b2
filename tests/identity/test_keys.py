"""Keys: one spelling, a file that only its owner can read, and signatures that are valid for nothing else."""

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.identity.keys import Key, check_public, verify_signature

KEY = Key.generate()
SECRET = KEY._secret.private_bytes_raw().hex()


def write_private(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    path.chmod(0o600)
    return path


@given(st.binary(max_size=200))
def test_what_a_key_signed_verifies(message: bytes) -> None:
    signature = KEY.sign(message)
    assert len(signature) == 64
    assert verify_signature(KEY.public, message, signature)


@given(st.binary(max_size=50), st.integers(0, 511))
def test_a_signature_with_one_bit_flipped_does_not(message: bytes, bit: int) -> None:
    signature = bytearray(KEY.sign(message))
    signature[bit // 8] ^= 1 << bit % 8
    assert not verify_signature(KEY.public, message, bytes(signature))


def test_a_signature_holds_for_no_other_message_and_no_other_key() -> None:
    signature = KEY.sign(b"a")
    assert not verify_signature(KEY.public, b"b", signature)
    assert not verify_signature(Key.generate().public, b"a", signature)


@given(st.text(max_size=70), st.binary(max_size=70))
def test_no_key_and_no_signature_of_any_form_is_an_error(public: str, signature: bytes) -> None:
    assert not verify_signature(public, b"message", signature)
    assert not verify_signature(KEY.public, b"message", signature)


def test_another_spelling_of_the_public_key_is_invalid() -> None:
    signature = KEY.sign(b"a")
    assert not verify_signature(KEY.public.upper(), b"a", signature)
    assert not verify_signature(KEY.public + "\n", b"a", signature)


def test_a_saved_key_comes_back_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    KEY.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Key.load(path).public == KEY.public
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


def test_a_key_is_private_under_any_umask_and_from_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    write = os.fdopen

    def watch(descriptor: int, *args: object) -> object:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return write(descriptor, *args)

    monkeypatch.setattr(os, "fdopen", watch)
    old = os.umask(0)
    try:
        KEY.save(tmp_path / "key")
    finally:
        os.umask(old)
    assert modes == [0o600]


def test_a_key_never_overwrites_anything(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"dear")
    with pytest.raises(ConfigError, match="never overwritten"):
        KEY.save(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == b"dear"
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


def test_a_link_is_not_followed_when_saving(tmp_path: Path) -> None:
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="already exists"):
        KEY.save(tmp_path / "key")
    assert not (tmp_path / "elsewhere").exists()


def test_a_missing_folder_is_refused_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        KEY.save(tmp_path / "none" / "key")


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    KEY.save(tmp_path / "key")
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Key.load(tmp_path / "key")


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"hello", SECRET.encode(), b"x" * 100_000], ids=range(5))
def test_a_file_that_is_not_a_key_is_refused_with_a_message(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match="not an Ed25519 key"):
        Key.load(write_private(tmp_path / "key", data))


def test_a_key_with_a_password_or_of_another_kind_is_refused_with_a_message(tmp_path: Path) -> None:
    locked = KEY._secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"pass"))
    with pytest.raises(ConfigError, match="without a password"):
        Key.load(write_private(tmp_path / "locked", locked))
    other = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with pytest.raises(ConfigError, match="not Ed25519"):
        Key.load(write_private(tmp_path / "other", other))


def test_a_missing_file_a_folder_and_a_pipe_are_refused_with_a_message(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "none", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=f"^{path}: "):
            Key.load(path)


def test_no_text_of_a_key_shows_its_secret() -> None:
    for text in (repr(KEY), str(KEY), f"{KEY}", f"{[KEY]}"):
        assert KEY.public in text
        assert SECRET not in text
    with pytest.raises(TypeError):
        pickle.dumps(KEY)


@pytest.mark.parametrize(
    "text", ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 64 + "\n", " " + "0" * 63, "x" * 9000]
)
def test_a_public_key_has_one_spelling(text: str) -> None:
    with pytest.raises(ConfigError, match="64 characters"):
        check_public(text)
    assert check_public(KEY.public) == KEY.public


def test_keys_do_not_import_torch() -> None:
    code = "import sys, shoal.identity.keys, shoal.shardcast.origin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SMALL = (
    "01" + "00" * 31,
    "00" * 32,
    "ec" + "ff" * 30 + "7f",
    "ed" + "ff" * 30 + "7f",
    "ee" + "ff" * 30 + "7f",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
)


@pytest.mark.parametrize("sign", [0, 0x80])
@pytest.mark.parametrize("text", SMALL)
def test_a_key_under_which_everyone_can_sign_is_invalid(text: str, sign: int) -> None:
    """R = the key or the identity, S = 0: some message of a few fits each of these points, without any secret."""
    data = bytearray.fromhex(text)
    data[31] |= sign
    public = data.hex()
    with pytest.raises(ConfigError, match="not a public key"):
        check_public(public)
    for head in (bytes(data), bytes([1]) + bytes(31)):
        assert not any(verify_signature(public, bytes([n]), head + bytes(32)) for n in range(64))
