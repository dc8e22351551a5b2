"""Blobs in a bucket: direct uploads are verified before they count, and a wrong bucket is reported at startup."""

import asyncio
import hashlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from shoal.coordinator.blobs import open_blobs
from shoal.coordinator.blobs.base import BlobError, WrongBlobError
from shoal.errors import ConfigError, UnavailableError

DATA = os.urandom(700_000)
NAME = hashlib.sha256(DATA).hexdigest()
KEY = f"{NAME[:2]}/{NAME}"


def test_what_was_uploaded_past_us_is_a_blob_once_it_was_found_right(s3_place: Any, ask_url: Any) -> None:
    async def check(store: Any) -> None:
        url = await store.sign_upload(NAME, len(DATA), 60)
        assert not await store.has(NAME)
        assert (await asyncio.to_thread(ask_url, "PUT", url, DATA))[0] == 200
        assert s3_place.list_all() == [f"incoming/{NAME}.{len(DATA)}"]
        assert await store.has(NAME)
        assert await s3_place.read(store, NAME) == DATA

    s3_place.run(check)
    assert s3_place.list_all() == [KEY]


@pytest.mark.parametrize(
    ("size", "data"),
    [(len(DATA), DATA[:-1]), (len(DATA), DATA[:-1] + b"x"), (len(DATA), DATA + b"x"), (len(DATA) + 1, DATA), (5, b"")],
    ids=["short", "other", "long", "announced-long", "empty"],
)
def test_what_was_uploaded_past_us_and_is_something_else_is_refused_and_removed(
    s3_place: Any, ask_url: Any, size: int, data: bytes
) -> None:
    async def check(store: Any) -> None:
        url = await store.sign_upload(NAME, size, 60)
        await asyncio.to_thread(ask_url, "PUT", url, data)
        with pytest.raises(WrongBlobError):
            await store.has(NAME)
        assert not await store.has(NAME)

    s3_place.run(check)
    assert s3_place.list_all() == []


def test_the_url_of_an_upload_cannot_change_the_blob_afterwards(s3_place: Any, ask_url: Any) -> None:
    async def check(store: Any) -> None:
        url = await store.sign_upload(NAME, len(DATA), 60)
        await asyncio.to_thread(ask_url, "PUT", url, DATA)
        assert await store.has(NAME)
        await asyncio.to_thread(ask_url, "PUT", url, b"x" * len(DATA))
        assert await store.has(NAME)
        assert await s3_place.read(store, NAME) == DATA

    s3_place.run(check)


def test_an_upload_that_is_changed_while_it_is_looked_at_counts_as_what_was_looked_at(
    s3_place: Any, ask_url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.coordinator.blobs import s3

    real = s3.S3Blobs._hash_object

    async def check(store: Any) -> None:
        url = await store.sign_upload(NAME, len(DATA), 60)
        await asyncio.to_thread(ask_url, "PUT", url, DATA)

        async def change(self: Any, key: str, size: int) -> str:
            found = await real(self, key, size)
            await asyncio.to_thread(ask_url, "PUT", url, b"x" * len(DATA))
            return found

        monkeypatch.setattr(s3.S3Blobs, "_hash_object", change)
        assert await store.has(NAME)
        assert await s3_place.read(store, NAME) == DATA

    s3_place.run(check)


def test_a_repeated_request_during_the_check_of_an_upload_waits_for_the_same_check(
    s3_place: Any, ask_url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.coordinator.blobs import s3

    real, looks = s3.S3Blobs._hash_object, []

    async def slow(self: Any, key: str, size: int) -> str:
        looks.append(key)
        await asyncio.sleep(0.2)
        return await real(self, key, size)

    async def check(store: Any) -> None:
        monkeypatch.setattr(s3.S3Blobs, "_hash_object", slow)
        await asyncio.to_thread(ask_url, "PUT", await store.sign_upload(NAME, len(DATA), 60), DATA)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await store.has(NAME)
        assert await asyncio.gather(*(store.has(NAME) for _ in range(3))) == [True] * 3
        assert len(looks) == 1

    s3_place.run(check)


def test_a_blob_can_be_downloaded_directly_only_with_a_url(s3_place: Any, ask_url: Any, moto: str) -> None:
    async def check(store: Any) -> None:
        await store.put(NAME, len(DATA), s3_place.send(DATA))
        url = await (await store.open(NAME)).sign_download(60)
        assert await asyncio.to_thread(ask_url, "GET", url) == (200, DATA)
        bare = url.partition("?")[0]
        assert (await asyncio.to_thread(ask_url, "GET", bare))[0] == 403

    s3_place.run(check)


def test_urls_end_and_name_one_object_alone(s3_place: Any) -> None:
    async def check(store: Any) -> None:
        url = urlsplit(await store.sign_upload(NAME, 7, 90))
        query = parse_qs(url.query)
        assert query["X-Amz-Expires"] == ["90"]
        assert url.path.endswith(f"/run/blobs/incoming/{NAME}.7")
        for expires_s in (0, -1, 10**6):
            with pytest.raises(AssertionError):
                await store.sign_upload(NAME, 7, expires_s)

    s3_place.run(check)


def test_unclaimed_uploads_are_swept(s3_place: Any, ask_url: Any) -> None:
    async def check(store: Any) -> None:
        await store.put(NAME, len(DATA), s3_place.send(DATA))
        for name in ("1" * 64, "2" * 64):
            await asyncio.to_thread(ask_url, "PUT", await store.sign_upload(name, 4, 60), b"junk")
        assert await store.sweep() == 0
        assert await store.sweep(timedelta(0)) == 2

    s3_place.run(check)
    assert s3_place.list_all() == [KEY]


def test_an_upload_of_another_size_than_announced_is_deleted_at_the_next_sweep(s3_place: Any, ask_url: Any) -> None:
    """A URL does not bound what is uploaded."""

    async def check(store: Any) -> None:
        for size, data in ((4, b"junk"), (4, b"j" * 100_000), (5, b"junk")):
            name = hashlib.sha256(b"%d %d" % (size, len(data))).hexdigest()
            await asyncio.to_thread(ask_url, "PUT", await store.sign_upload(name, size, 60), data)
        assert await store.sweep() == 2

    s3_place.run(check)
    assert len(s3_place.list_all()) == 1


def test_removing_a_blob_removes_what_was_uploaded_for_it(s3_place: Any, ask_url: Any) -> None:
    async def check(store: Any) -> None:
        await store.put(NAME, len(DATA), s3_place.send(DATA))
        await asyncio.to_thread(ask_url, "PUT", await store.sign_upload(NAME, len(DATA), 60), DATA)
        await asyncio.to_thread(ask_url, "PUT", await store.sign_upload("1" * 64, 4, 60), b"junk")
        await store.remove(NAME)

    s3_place.run(check)
    assert s3_place.list_all() == [f"incoming/{'1' * 64}.4"]


def test_uploads_of_other_blobs_are_neither_taken_for_this_one_nor_touched(s3_place: Any, ask_url: Any) -> None:
    async def check(store: Any) -> None:
        names = ["0" * 64, NAME[:-1] + ("0" if NAME[-1] != "0" else "1"), "f" * 64]
        for name in names:
            await asyncio.to_thread(ask_url, "PUT", await store.sign_upload(name, len(DATA), 60), DATA)
        assert not await store.has(NAME)
        assert s3_place.list_all() == sorted(f"incoming/{name}.{len(DATA)}" for name in names)

    s3_place.run(check)


@pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA), len(DATA) + 1])
def test_what_is_swapped_before_it_is_copied_must_have_the_announced_size_too(
    s3_place: Any, ask_url: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    from shoal.coordinator.blobs import s3

    real = s3.obstore.copy_async

    async def check(store: Any) -> None:
        url = await store.sign_upload(NAME, size, 60)
        await asyncio.to_thread(ask_url, "PUT", url, bytes(size))

        async def swap(*args: Any) -> None:
            monkeypatch.setattr(s3.obstore, "copy_async", real)
            await asyncio.to_thread(ask_url, "PUT", url, DATA)
            await real(*args)

        monkeypatch.setattr(s3.obstore, "copy_async", swap)
        if size == len(DATA):
            assert await store.has(NAME)
        else:
            with pytest.raises(WrongBlobError):
                await store.has(NAME)

    s3_place.run(check)


def test_what_is_put_right_after_it_was_copied_is_too_late(
    s3_place: Any, ask_url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.coordinator.blobs import s3

    real = s3.S3Blobs._hash_object

    async def check(store: Any) -> None:
        url = await store.sign_upload(NAME, len(DATA), 60)
        await asyncio.to_thread(ask_url, "PUT", url, bytes(len(DATA)))

        async def mend(self: Any, key: str, size: int) -> str:
            await asyncio.to_thread(ask_url, "PUT", url, DATA)
            return await real(self, key, size)

        monkeypatch.setattr(s3.S3Blobs, "_hash_object", mend)
        with pytest.raises(WrongBlobError):
            await store.has(NAME)

    s3_place.run(check)
    assert s3_place.list_all() == []


def test_a_bucket_that_went_away_is_nobodys_fault(s3_place: Any, ask_url: Any, moto: str) -> None:
    async def check(store: Any) -> None:
        bucket = urlsplit(s3_place.url).hostname
        for attempt in (
            lambda: store.put(NAME, len(DATA), s3_place.send(DATA)),
            lambda: store.open(NAME),
        ):
            assert (await asyncio.to_thread(ask_url, "DELETE", f"{moto}/{bucket}"))[0] in (204, 404)
            with pytest.raises(BlobError) as caught:
                await attempt()
            assert not isinstance(caught.value, WrongBlobError)

    s3_place.run(check)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://host/x", "not a blob store"),
        ("s3:///prefix", "expected s3://BUCKET"),
        ("s3://bucket/x?acl=public", "expected s3://BUCKET"),
        ("s3://key:secret@bucket/x", "from the environment"),
        ("s3://bucket:99/x", "from the environment"),
    ],
)
def test_a_url_that_is_wrong_is_explained(url: str, text: str, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError, match=text) as caught:
        open_blobs(url, tmp_path)
    assert "secret" not in str(caught.value)


def test_a_missing_bucket_is_reported_at_startup(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such bucket"):
        open_blobs(bucket.replace("shoal-test", "shoal-none"), tmp_path)


def test_wrong_credentials_are_reported_at_startup(bucket: str, moto: str, ask_url: Any, tmp_path: Path) -> None:
    ask_url("POST", f"{moto}/moto-api/reset-auth", b"0")
    try:
        with pytest.raises(ConfigError, match="credentials"):
            open_blobs(bucket, tmp_path)
    finally:
        ask_url("POST", f"{moto}/moto-api/reset-auth", b"inf")


def test_an_unreachable_server_is_reported_at_startup(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.coordinator.blobs import s3 as module

    monkeypatch.setattr(module, "_RETRY_S", 1)
    with pytest.raises(UnavailableError, match="cannot use the bucket"):
        open_blobs("s3://shoal-test-0/x?endpoint=http://127.0.0.1:1", tmp_path)


def test_an_http_endpoint_from_the_environment_is_explained(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"an http:// endpoint belongs in \?endpoint="):
        open_blobs("s3://shoal-test-0/x", tmp_path)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("shoal.coordinator.blobs.") or name == "obstore"]:
        if name.endswith((".s3", ".bucket", "obstore")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r'pip install "\.\[s3\]"'):
        open_blobs("s3://bucket/x", tmp_path)
