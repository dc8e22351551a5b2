"""Origin, relays and clients as the processes that users start, connected in all supported ways."""

import signal
from collections.abc import Callable
from typing import Any

MB = 1_000_000
SIZE = 6 * MB


def test_a_version_goes_through_a_relay_and_the_next_one_as_a_delta(cast: Any) -> None:
    first = cast.make_checkpoint("v1", SIZE)
    origin = cast.origin(first)
    relay = cast.relay("relay", origin.url)
    assert str(cast.data / "out" / "v1") in cast.pull(relay.url).finish()
    cast.check_same(first, 1)
    second = cast.change_bytes(first, "v2", 5 * MB, b"changed")
    before = origin.sent_bytes
    assert "published v2 " in cast.hand_over(second, 2).finish()
    origin.await_text("published v2")
    cast.pull(relay.url).finish()
    cast.check_same(second, 2)
    assert origin.sent_bytes - before < MB, "seven bytes differ"
    for actor in (origin, relay):
        actor.kill(signal.SIGTERM)
        assert actor.fail(0) == "shoal: stopped"


def test_twenty_clients_on_one_host_all_finish(cast: Any) -> None:
    path = cast.make_checkpoint("v1", 2 * MB)
    origin = cast.origin(path)
    relay = cast.relay("relay", origin.url)
    sources = (relay.url, origin.url)
    clients = {f"out{index}": cast.pull(*sources, out=f"out{index}") for index in range(20)}
    for out, client in clients.items():
        client.finish()
        cast.check_same(path, 1, out)


def test_two_clients_in_one_folder_are_one_too_many(cast: Any, wait_until: Callable[..., None]) -> None:
    path = cast.make_checkpoint("v1", SIZE)
    origin = cast.origin(path)
    url = origin.url
    origin.kill(signal.SIGSTOP)  # so that the first one still runs when the second starts
    first = cast.pull(url)
    lock = cast.data / "out" / ".shardcast" / "store.lock"
    wait_until(lambda: lock.exists() and lock.read_text() != "", lambda: "lock")
    second = cast.pull(url, name="second")
    assert f"in use by process {first.process.pid}" in second.fail(2)
    assert second.text.count("\n") == 1 and first.process.poll() is None
    origin.kill(signal.SIGCONT)
    first.finish()
    cast.check_same(path, 1)


def test_a_version_published_anew_while_it_is_fetched_arrives_as_the_new_one(cast: Any) -> None:
    old, new = cast.make_checkpoint("old", SIZE), cast.make_checkpoint("new", SIZE)
    origin = cast.origin(old, 1, "--rate", "3MB", "--shard-size", "256KiB")
    relay = cast.relay("relay", origin.url)
    client = cast.pull(relay.url)
    origin.await_sent(SIZE // 4)
    for actor in (relay, client):  # in the middle of a transfer
        actor.kill(signal.SIGSTOP)
    assert not (cast.data / "out" / "v1").exists()
    cast.hand_over(new, 1).finish()
    for actor in (relay, client):
        actor.kill(signal.SIGCONT)
    client.finish()
    cast.check_same(new, 1)


def test_a_version_that_was_deleted_is_not_waited_for(cast: Any) -> None:
    origin = cast.origin(cast.make_checkpoint("v1", MB), 1, "--keep", "1")
    origin.await_text("published v1")
    cast.hand_over(cast.make_checkpoint("v2", MB), 2).finish()
    assert cast.pull(origin.url, flags=("--version", "1")).fail(2).startswith("shoal: version 1: ")
