"""Which versions are kept: the newest, and the chain to it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.shardcast.fetch import plan
from shoal.shardcast.store.store import MAX_CHAIN, find_chain, list_kept


@dataclass
class Kept:
    """The parts of an entry that retention uses."""

    parent: int | None = None
    anchor: bool = False
    complete: bool = False
    settled: bool = True
    delta: bool = True
    is_adapter: bool = False

    @property
    def log(self) -> Any:
        head = SimpleNamespace(parent=self.parent, anchor=self.anchor)
        return SimpleNamespace(head=head, delta_settled=self.settled, delta=object() if self.delta else None)


def make_run(first: int, last: int, anchor: int, **fields: Any) -> Any:
    return {version: Kept(version - 1, version == anchor, **fields) for version in range(first, last + 1)}


def test_a_server_keeps_the_newest_and_all_deltas_since_the_anchor() -> None:
    entries = make_run(1, 14, anchor=8, complete=True)
    assert list_kept(entries, 2, serves=True) == {8, 9, 10, 11, 12, 13, 14}
    assert list_kept(entries, 9, serves=True) == set(range(6, 15))


def test_a_client_keeps_the_deltas_since_what_it_holds_also_across_an_anchor() -> None:
    entries = make_run(1, 12, anchor=8)
    entries[6].complete = True
    assert list_kept(entries, 2, serves=False) == {6, 7, 8, 9, 10, 11, 12}
    entries[12].complete = True
    assert list_kept(entries, 2, serves=False) == {11, 12}


def test_a_client_that_holds_nothing_of_the_chain_keeps_it_from_the_anchor() -> None:
    entries = make_run(5, 12, anchor=8)
    assert list_kept(entries, 2, serves=False) == {8, 9, 10, 11, 12}
    entries[3] = Kept(complete=True)
    assert list_kept(entries, 2, serves=False) == {3, 8, 9, 10, 11, 12}


@pytest.mark.parametrize("serves", [True, False])
def test_a_version_without_a_delta_begins_a_chain_and_an_undecided_one_does_not(serves: bool) -> None:
    entries = make_run(1, 6, anchor=1)
    entries[4] = Kept(3, delta=False)
    assert find_chain(entries, serves=serves) == {4, 5, 6}
    entries[4] = Kept(3, delta=False, settled=False)
    assert find_chain(entries, serves=serves) == {1, 2, 3, 4, 5, 6}


def test_the_first_missing_version_of_the_chain_is_wanted() -> None:
    entries = make_run(5, 7, anchor=1)
    assert find_chain(entries, serves=True) == {4, 5, 6, 7}
    assert find_chain({}, serves=True) == set() == list_kept({}, 3, serves=False)


@given(
    st.dictionaries(
        st.integers(0, 200),
        st.builds(Kept, st.none() | st.integers(0, 200), st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    ),
    st.integers(1, 6),
    st.booleans(),
)
def test_whatever_is_announced_what_is_kept_is_bounded_and_has_the_newest(
    entries: Any, keep: int, serves: bool
) -> None:
    for version, entry in entries.items():  # as every manifest has it
        entry.parent = entry.parent if entry.parent is not None and entry.parent < version else None
    kept = list_kept(entries, keep, serves=serves)
    assert len(kept) <= keep + 1 + MAX_CHAIN
    assert set(sorted(entries)[-keep:]) <= kept


def test_an_endless_chain_is_cut() -> None:
    assert len(find_chain(make_run(1, 500, anchor=0), serves=True)) == MAX_CHAIN


def test_heads_that_come_in_any_order_end_as_the_chain(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        files = {"a": b"x"}
        announced = {
            version: maker.make_lines(version, files, parent=version - 1, anchor=version == 8)[0]
            for version in range(7, 13)
        }
        for serves in (True, False):
            for name, order in (("up", sorted(announced)), ("down", sorted(announced)[::-1])):
                store = await maker.open_store(f"{name}-{serves}", keep=2, serves=serves)
                for version in order:
                    if name == "down" and version == 7:
                        assert store.is_gone(7)
                        break
                    assert not store.is_gone(version)
                    await store.adopt(announced[version])
                assert [entry.version for entry in store.entries()] == [8, 9, 10, 11, 12]
                await store.close()

    run(work)


def test_a_limit_of_bytes_spares_the_chain_as_long_as_it_can(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        files = {"a": bytes(1000)}
        store = await maker.open_store(keep=4, max_bytes=3000)
        await maker.fill_store(store, 1, files, anchor=True)
        await maker.fill_store(store, 2, files, anchor=False)
        lines = maker.make_lines(3, files, parent=1, anchor=False, delta=b"d")
        await maker.add_lines(store, lines)
        await maker.fill_store(store, 3, files, parent=1, anchor=False, delta=b"d")
        lines = maker.make_lines(4, files, parent=3, anchor=False, delta=b"d")
        entry = await maker.add_lines(store, lines)
        await entry.full.prepare()
        assert [entry.version for entry in store.entries()] == [1, 3, 4], "not the oldest, but the one on no way"
        await store.close()

    run(work)


def test_a_late_client_gets_the_anchor_and_the_deltas_since_from_a_relay(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "LISTING_S", 60.0)  # on a busy machine reading manifests takes longer than the default

    async def work() -> None:
        data = bytearray(make_bytes(6 * (1 << 16), 1))
        async with open_network() as net:
            relay = await net.relay(net.url)
            for version in range(1, 15):
                data[version] ^= 1
                await net.publish(version, {"weights": bytes(data)})
            while not all(entry.log.ended for entry in relay.store.entries()) or relay.store.entries()[-1].version < 14:
                await relay.store.changed.wait()
            while relay.store.find(7) is not None:  # until the anchor is built
                await relay.store.changed.wait()
            assert [entry.version for entry in relay.store.entries()] == list(range(8, 15))
            proxy = await net.proxy(upstream=str(relay.server.url))
            client = await net.client(proxy.url)
            complete = []

            async def watch() -> None:
                while True:
                    await client.store.changed.wait()
                    complete.append([entry.version for entry in client.store.entries() if entry.complete])

            watching = asyncio.create_task(watch())
            assert read_files(await client.pull()) == {"weights": bytes(data)}
            watching.cancel()
            assert max(map(len, complete)) <= 3, "what was only built upon does not stay"
            asked = {tuple(target.split("/")[2:5:2]) for target in proxy.targets if "/v/" in target}
            fetched = sorted((int(version), blob) for version, blob in asked if not blob.startswith("manifest"))
            assert fetched == [(8, "full"), *((version, "delta") for version in range(9, 15))]
            assert [entry.version for entry in client.store.entries()] == [13, 14], "keep is 2"

    run(work)
