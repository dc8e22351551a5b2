"""Origin, relays and clients as the processes that users start, connected in all supported ways."""

import signal
from collections.abc import Callable
from typing import Any

MB = 1_000_000
SIZE = 6 * MB


def test_a_version_goes_through_a_relay_and_the_next_one_as_a_delta(processes: Any) -> None:
    first = processes.make_checkpoint("v1", SIZE)
    origin = processes.origin(first)
    relay = processes.relay("relay", origin.url)
    assert str(processes.data / "out" / "v1") in processes.pull(relay.url).finish()
    processes.check_same(first, 1)
    second = processes.change_bytes(first, "v2", 5 * MB, b"changed")
    before = origin.sent_bytes
    assert "published v2 " in processes.hand_over(second, 2).finish()
    origin.await_text("published v2")
    processes.pull(relay.url).finish()
    processes.check_same(second, 2)
    assert origin.sent_bytes - before < MB, "seven bytes differ"
    for child in (origin, relay):
        child.kill(signal.SIGTERM)
        assert child.fail(0) == "shoal: stopped"


def test_twenty_clients_on_one_host_all_finish(processes: Any) -> None:
    path = processes.make_checkpoint("v1", 2 * MB)
    origin = processes.origin(path)
    relay = processes.relay("relay", origin.url)
    sources = (relay.url, origin.url)
    clients = {f"out{index}": processes.pull(*sources, out=f"out{index}") for index in range(20)}
    for out, client in clients.items():
        client.finish()
        processes.check_same(path, 1, out)


def test_two_clients_in_one_folder_are_one_too_many(processes: Any, wait_until: Callable[..., None]) -> None:
    path = processes.make_checkpoint("v1", SIZE)
    origin = processes.origin(path)
    url = origin.url
    origin.kill(signal.SIGSTOP)  # so that the first one still runs when the second starts
    first = processes.pull(url)
    lock = processes.data / "out" / ".shardcast" / "store.lock"
    wait_until(lambda: lock.exists() and lock.read_text() != "", lambda: "lock")
    second = processes.pull(url, name="second")
    assert f"in use by process {first.process.pid}" in second.fail(2)
    assert second.text.count("\n") == 1 and first.process.poll() is None
    origin.kill(signal.SIGCONT)
    first.finish()
    processes.check_same(path, 1)


def test_a_version_published_anew_while_it_is_fetched_arrives_as_the_new_one(processes: Any) -> None:
    old, new = processes.make_checkpoint("old", SIZE), processes.make_checkpoint("new", SIZE)
    origin = processes.origin(old, 1, "--rate", "3MB", "--shard-size", "256KiB")
    relay = processes.relay("relay", origin.url)
    client = processes.pull(relay.url)
    origin.await_sent(SIZE // 4)
    for child in (relay, client):  # in the middle of a transfer
        child.kill(signal.SIGSTOP)
    assert not (processes.data / "out" / "v1").exists()
    processes.hand_over(new, 1).finish()
    for child in (relay, client):
        child.kill(signal.SIGCONT)
    client.finish()
    processes.check_same(new, 1)


def test_a_version_that_was_deleted_is_not_waited_for(processes: Any) -> None:
    origin = processes.origin(processes.make_checkpoint("v1", MB), 1, "--keep", "1")
    origin.await_text("published v1")
    processes.hand_over(processes.make_checkpoint("v2", MB), 2).finish()
    assert processes.pull(origin.url, flags=("--version", "1")).fail(2).startswith("shoal: version 1: ")
