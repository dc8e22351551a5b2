import asyncio
import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError, DiskError
from shoal.shardcast import client as client_module
from shoal.shardcast.fetch.upstreams import GoneError
from shoal.shardcast.store import writer
from shoal.shardcast.store import writer as parts

SHARD = 1 << 16


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_versions_appear_as_folders_with_a_link_to_the_newest(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            client = await net.client(net.url)
            out = net.root / "out"
            for version in (3, 4, 10):
                await net.publish(version, {"weights": make_bytes(3 * SHARD, version)})
                folder = await client.pull(version)
                assert folder == out / f"v{version}"
                assert (out / "latest").readlink() == Path(f"v{version}")
            assert list_names(out) == [".shardcast", "latest", "v10", "v4"]
            assert (out / "latest" / "weights").read_bytes() == make_bytes(3 * SHARD, 10)

    run(work)


def test_an_older_version_pulled_later_does_not_move_the_link_back(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            for version in (1, 2):
                await net.publish(version, {"weights": make_bytes(3 * SHARD, version)})
            client = await net.client(net.url)
            await client.pull(2)
            await client.pull(1)
            assert (net.root / "out" / "latest").readlink() == Path("v2")
            assert list_names(net.root / "out") == [".shardcast", "latest", "v1", "v2"]

    run(work)


def test_a_version_is_on_disk_once(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            client = await net.client(net.url)
            folder = await client.pull()
            stored = client.store.find(1).full.path_of("weights")
            assert stored.samefile(folder / "weights")

    run(work)


def test_where_links_are_refused_files_are_copied(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)

    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(3 * SHARD, 1)}
            await net.publish(1, files)
            client = await net.client(net.url)
            folder = await client.pull()
            assert read_files(folder) == files
            assert not client.store.find(1).full.path_of("weights").samefile(folder / "weights")

    run(work)


def test_a_foreign_folder_in_the_way_is_an_error_and_stays(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            mine = net.root / "out" / "v1"
            mine.mkdir(parents=True)
            (mine / "thesis").write_bytes(b"years of work")
            client = await net.client(net.url)
            with pytest.raises(ConfigError, match=r"v1: not created by shoal"):
                await client.pull()
            assert (mine / "thesis").read_bytes() == b"years of work"

    run(work)


def test_foreign_folders_are_never_removed(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            for name in ("v0", "vault", "v99"):
                (net.root / "out" / name).mkdir(parents=True)
            client = await net.client(net.url, keep=1)
            for version in (1, 2, 3):
                await net.publish(version, {"weights": make_bytes(3 * SHARD, version)})
                await client.pull(version)
            assert list_names(net.root / "out") == [".shardcast", "latest", "v0", "v3", "v99", "vault"]

    run(work)


def test_what_a_killed_client_had_moved_aside_is_removed_at_the_next_start(
    open_network: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Simulates a kill: nothing is cleaned up."""

    remove = shutil.rmtree

    def die_at_old(path: Any, *args: Any, **options: Any) -> None:
        if Path(path).name.startswith("old-") and Path(path).exists():
            raise Killed
        remove(path, *args, **options)

    async def work() -> None:
        async with open_network() as net:
            hidden = net.root / "out" / ".shardcast"
            client = await net.client(net.url, keep=1)
            await net.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            await client.pull(1)
            await net.publish(2, {"weights": make_bytes(3 * SHARD, 2)})
            with monkeypatch.context() as patch:
                patch.setattr(client_module.shutil, "rmtree", die_at_old)
                with pytest.raises(Killed):
                    await client.pull(2)
            await client.close()
            assert (hidden / "old-v1").exists()
            again = await net.client(net.url, keep=1)
            assert not (hidden / "old-v1").exists()
            assert (await again.pull(2)).name == "v2"
            assert list_names(net.root / "out") == [".shardcast", "latest", "v2"]

    run(work)


def test_at_least_one_version_is_kept(open_network: Any, run: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            with pytest.raises(ConfigError, match="keep = 0"):
                await net.client(net.url, keep=0)

    run(work)


def test_one_version_kept_is_one_on_disk(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            client = await net.client(net.url, keep=1)
            data = make_bytes(30 * SHARD, 1)
            for version in (1, 2, 3):
                data = bytes([data[0] ^ 1]) + data[1:]
                await net.publish(version, {"weights": data})
                await client.pull(version)
                fulls = [path.parent.name[:3] for path in (net.root / "out" / ".shardcast").glob("v*/full")]
                assert fulls == [f"v{version}-"]

    run(work)


def test_a_republished_version_replaces_the_old_one(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            client = await net.client(net.url)
            for seed in (1, 2):
                files = {"weights": make_bytes(3 * SHARD, seed), f"only-{seed}": b"x"}
                entry = await net.publish(1, files)
                while client.store.find(1) is None or client.store.find(1).digest != entry.digest:
                    await client.puller._wait_change()
                assert read_files(await client.pull(1)) == files
            assert list_names(net.root / "out") == [".shardcast", "latest", "v1"]

    run(work)


def test_a_second_client_in_the_same_folder_gets_a_clear_error(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            client = await net.client(net.url)
            with pytest.raises(ConfigError, match="in use by process") as caught:
                await net.client(net.url)
            assert "\n" not in str(caught.value)
            assert (await client.pull()).name == "v1"

    run(work)


def test_a_client_or_relay_stopped_while_it_starts_leaves_its_folder_free(open_network: Any, run: Any) -> None:
    async def work() -> None:
        async with open_network() as net:

            async def be_silent(target: str, writer: asyncio.StreamWriter) -> bool:
                await asyncio.sleep(3600)
                return True

            proxy = await net.proxy(be_silent)
            for start in (net.client, net.relay):
                starting = asyncio.create_task(start(proxy.url))
                await asyncio.sleep(0.2)
                assert not starting.done()
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                assert starting.cancelled()
                again = await start(net.url)
                await again.close()

    run(work)


KILLED = """
import asyncio, sys
from pathlib import Path
from shoal.shardcast.client import ShardcastClient

async def main():
    out, url, publisher = sys.argv[1:]
    async with await ShardcastClient.open(Path(out), [url], run="reef", publisher=publisher) as client:
        await client.pull()

asyncio.run(main())
"""


def test_a_client_killed_in_the_middle_continues_from_its_shards(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(40 * SHARD, 1)}
            await net.publish(1, files)
            gate = asyncio.Event()
            passed = 0

            async def hold(target: str, writer: asyncio.StreamWriter) -> bool:
                nonlocal passed
                passed += "/full/" in target
                if passed > 20:
                    await gate.wait()
                return False

            slow, out = await net.proxy(hold), net.root / "out"
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", KILLED, str(out), slow.url, net.key.public
            )
            try:
                while sum(path.read_bytes().count(1) for path in out.glob(".shardcast/v1-*/full.have")) < 20:
                    await asyncio.sleep(0.02)
            finally:
                process.kill()
                await process.wait()
            assert not (out / "v1").exists()
            proxy = await net.proxy()
            client = await net.client(proxy.url)
            assert read_files(await client.pull()) == files
            assert len(proxy.list_shards()) == len(set(proxy.list_shards())) == 20

    run(work)


def test_something_else_called_latest_is_refused_at_the_start(open_network: Any, run: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            (net.root / "out" / "latest").mkdir(parents=True)
            with pytest.raises(ConfigError, match="latest"):
                await net.client(net.url)
            (net.root / "out" / "latest").rmdir()
            await net.client(net.url)  # the folder is released

    run(work)


def test_a_full_disk_is_one_clear_error_before_anything_is_fetched(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(9 * SHARD, 1)}
            await net.publish(1, files)
            client = await net.client(net.url)
            with monkeypatch.context() as patch:
                patch.setattr(parts.os, "posix_fallocate", refuse)
                with pytest.raises(DiskError, match="No space left"):
                    await client.pull()
            assert read_files(await client.pull()) == files

    run(work)


def test_a_disk_that_fills_up_in_the_middle_keeps_what_is_there(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    write_at = writer.write_at

    def fill_up(*args: Any) -> None:
        nonlocal written
        written += 1
        if written > 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_at(*args)

    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(30 * SHARD, 1)}
            await net.publish(1, files)
            client = await net.client(net.url, in_flight=1)
            with monkeypatch.context() as patch:
                patch.setattr(writer, "write_at", fill_up)
                with pytest.raises(DiskError, match="No space left"):
                    await client.pull()
            kept = 30 - client.store.find(1).full.num_missing
            assert kept >= 1
            proxy = await net.proxy()
            await client.close()
            again = await net.client(proxy.url)
            assert read_files(await again.pull()) == files
            assert len(proxy.list_shards()) == 30 - kept

    run(work)


def test_a_damaged_list_of_our_folders_is_an_error_that_names_it(open_network: Any, run: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            hidden = net.root / "out" / client_module.HIDDEN
            hidden.mkdir(parents=True)
            (hidden / "published.json").write_bytes(b"{")
            with pytest.raises(ConfigError, match=r"published\.json"):
                await net.client(net.url)

    run(work)


def test_an_older_version_that_takes_the_place_of_the_newest_is_where_the_link_points(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            for version in (1, 2):
                await net.publish(version, {"weights": make_bytes(1000, version)})
            client = await net.client(net.url, keep=1)
            await client.pull()
            folder = await client.pull(1)
            assert folder.is_dir() and (net.root / "out" / "latest").resolve() == folder.resolve()
            assert not (net.root / "out" / "v2").exists()

    run(work)


def test_a_version_far_behind_the_newest_is_pulled_while_servers_keep_it(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network(keep=2, keep_s=3600.0) as net:
            relay = await net.relay(net.url, keep=2, keep_s=3600.0)
            data = make_bytes(8 * SHARD, 1)
            for version in range(1, 21):
                data = bytes([data[0] ^ version]) + data[1:]
                await net.publish(version, {"weights": data})
                if version == 4:
                    old = data
            ordinary = await net.client(str(relay.server.url))
            await ordinary.pull()
            with pytest.raises(GoneError):
                await ordinary.pull(4)  # it follows the newest only
            client = await net.client(str(relay.server.url), out="old", only=4)
            assert (await client.pull(4) / "weights").read_bytes() == old
            missing = await net.client(str(relay.server.url), out="missing", only=21)
            with pytest.raises(GoneError):
                await missing.pull(21)  # does not wait for what may still come

    run(work)


def test_old_versions_are_kept_within_their_time_and_space(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        full = 4 * SHARD
        async with open_network(keep=1, keep_s=3600.0, keep_bytes=4 * full) as net:
            for version in range(1, 8):
                await net.publish(version, {"weights": make_bytes(full, version)})
            assert [entry.version for entry in net.store.entries()] == [4, 5, 6, 7]
            net.store.keep_s = 0.0
            await net.store.trim()
            assert [entry.version for entry in net.store.entries()] == [7]

    run(work)
