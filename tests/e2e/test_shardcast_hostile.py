"""Hostile relays and clients, each in its own process, among honest ones.

All tests of the file share the processes. An honest relay is stopped (SIGSTOP) until every hostile one has been asked
for the part that it corrupts, so that none is skipped by chance. Then it continues, and every client must end up with
exactly the published bytes.
"""

import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shoal.identity.keys import Key
from shoal.shardcast.format.layout import File
from shoal.shardcast.format.records import End, Hashes, ManifestHead, digest_head, open_line, sign_record

SHARD = 1 << 16
NUM_IDLE, NUM_DEAF = 2000, 20
ANON_KB = 150_000

GROUPS = {
    "wrong-bytes": ("corrupt", "swapped"),
    "wrong-sizes": ("shorter", "longer", "excess", "huge", "shifted"),
    "stalled": ("one_byte", "silent"),
    "cut-off": ("half", "reset"),
    "endless": ("endless", "endless_head", "tiny"),
    "refused": ("gone", "busy"),
    "redirected": ("redirect", "redirect_list", "redirect_probe"),
    "redirected-manifests": ("redirect_manifest",),
    "lists": ("forged_size", "forged_version", "endless_list", "tiny_list", "tiny_gaps"),
    "manifests": ("forged_hash", "shuffled", "cut", "endless_line", "tiny_manifest", "alien"),
}
"""Sources of one client each: all sources of a group corrupt the same part, so that each is tried."""

CHARGES = {
    ("wrong-bytes", "sent a wrong shard "): ("corrupt", "swapped"),
    ("lists", "announced a forged version ("): ("forged_size", "forged_version"),
    ("manifests", "sent a forged manifest of version 1 ("): ("forged_hash", "shuffled", "alien"),
}
"""What a client must report about which relay."""

BAD_NAMES = {
    "parent": "../evil",
    "uncle": "../../sentinel/evil",
    "folder": "a/b",
    "nul": "nul\0",
    "long": "x" * 10_000,
    "hidden": ".shardcast",
    "dots": "..",
    "nothing": "",
}


@dataclass
class HostileRelays:
    """The processes: hostile relays, and a client for each group of them."""

    path: Path
    evil: Any
    witness: Any
    honest: Any
    victim: Any
    urls: dict[str, str]
    clients: dict[str, Any] = field(default_factory=dict)


def make_head(key: Key, **fields: Any) -> bytes:
    """A head signed by the publisher: of version 2, far newer than the others."""
    given = {"run": "test", "version": 2, "serial": 2**62, "shard_size": SHARD, "parent": None, "anchor": True}
    return sign_record(key, "", 0, ManifestHead(**{**given, "files": (File("w", 5),), **fields}))


def make_heads(key: Key, root: Path) -> dict[str, bytes]:
    """Heads that must be rejected, although all but one have a valid signature."""
    names = {**BAD_NAMES, "absolute": str(root / "sentinel" / "evil")}
    heads = {f"name-{kind}": make_head(key, files=(File(name, 5),)) for kind, name in names.items()}
    return heads | {
        "many-files": make_head(key, files=tuple(File(f"f{index}", 1) for index in range(5000))),
        "many-shards": make_head(key, files=(File("w", 2**40),)),
        "many-bytes": make_head(key, files=(File("w", 2**60),), shard_size=1 << 26),
        "less-than-no-bytes": make_head(key, files=(File("w", -5),)),
        "no-shard-size": make_head(key, shard_size=0),
        "large-version": make_head(key, version=2**70),
        "twins": make_head(key, files=(File("w", 5), File("w", 5))),
        "another-run": make_head(key, run="another"),
        "another-key": make_head(Key.generate()),
    }


def make_alien(key: Key) -> bytes:
    """Everything after the head of a manifest of another run by the same publisher."""
    digest = digest_head(open_line(make_head(key, run="another", version=1), key.public, ""))
    records = [Hashes(0, (bytes(32),) * 17), End(bytes(32), None)]
    return b"".join(sign_record(key, digest, number, record) + b"\n" for number, record in enumerate(records, 1))


@pytest.fixture(scope="module")
def crowded(shared_processes: Any, wait_until: Callable[..., None]) -> Any:
    """An origin with thousands of idle connections and some that never read, from the first test of the file on."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 2 * NUM_IDLE:
        pytest.skip(f"needs more than the {hard} open files allowed here")
    path = shared_processes.make_checkpoint("crowded", 12_000_000)
    origin = shared_processes.origin(path, name="fortress", data="fortress")
    origin.await_text("published v1")
    (folder,) = (shared_processes.data / "fortress").glob("v1-*")
    target = f"/v/1/{folder.name.removeprefix('v1-')}/full/1"
    crowd = shared_processes.script("evil_client.py", "crowd", origin.url, NUM_IDLE, NUM_DEAF, target)
    crowd.await_text("ready")
    wait_until(lambda: count_deaf(origin) >= NUM_DEAF, lambda: "all connections that never read")
    return origin


def count_deaf(origin: Any) -> int:
    """Connections that never read, including those already cut off for it."""
    return origin.read_metric("shoal_transfers") + origin.read_metric("shoal_cut_total")


@pytest.fixture(scope="module")
def hostile_relays(shared_processes: Any, wait_until: Callable[..., None]) -> HostileRelays:
    path = shared_processes.make_checkpoint("v1", 16 * SHARD)
    origin = shared_processes.origin(path, 1, "--shard-size", str(SHARD))
    witness = shared_processes.script("evil_relay.py", "witness", origin.url, "witness,witness")
    witness.await_text("\n")
    trap = witness.text.split()[1]
    lists = {
        **make_heads(shared_processes.key, shared_processes.root),
        "replayed": make_head(shared_processes.key, version=1, serial=1),
    }
    files = {name: shared_processes.write_file(f"{name}.lines", line + b"\n") for name, line in lists.items()}
    alien = shared_processes.write_file("alien.lines", make_alien(shared_processes.key))
    specs = [f"{name},listed,{file}" for name, file in files.items()]
    for name in sum(GROUPS.values(), ()):
        specs.append(f"alien,lined,{alien}" if name == "alien" else f"{name},{name},{trap}")
    evil, other = (
        shared_processes.script("evil_relay.py", name, origin.url, *specs) for name in ("evil", "evil-upstreams")
    )
    honest = shared_processes.relay("honest", origin.url)
    urls, upstreams = (dict(list_urls(each, len(specs))) for each in (evil, other))
    honest.await_complete(1)
    address = honest.url
    honest.kill(signal.SIGSTOP)
    victim = shared_processes.relay("victim", *upstreams.values(), address)
    hostile_relays = HostileRelays(path, evil, witness, honest, victim, urls)
    groups = {
        **GROUPS,
        "heads": tuple(make_heads(shared_processes.key, shared_processes.root)),
        "replays": ("replayed",),
    }
    for group, names in groups.items():
        hostile_relays.clients[group] = shared_processes.pull(*(urls[name] for name in names), address, out=group)
    charges = {**CHARGES, ("heads", "announced a forged version ("): groups["heads"]}
    wait_until(
        lambda: not list_unseen(hostile_relays, charges), lambda: f"hits of {list_unseen(hostile_relays, charges)}"
    )
    honest.kill(signal.SIGCONT)
    return hostile_relays


def list_unseen(hostile_relays: HostileRelays, charges: dict[tuple[str, str], tuple[str, ...]]) -> list[str]:
    """Hostile relays that were not yet asked for what they corrupt, or whose lie was not yet reported."""
    unseen = [name for name in hostile_relays.urls if f"hit {name} " not in hostile_relays.evil.text]
    for (group, sentence), names in charges.items():
        text = hostile_relays.clients[group].text
        unseen += [name for name in names if f"{hostile_relays.urls[name]}: {sentence}" not in text]
    return unseen


def list_urls(evil: Any, count: int) -> Iterator[tuple[str, str]]:
    evil.await_text(" http://", count)
    for line in evil.text.splitlines():
        if not line.startswith("hit "):
            name, url = line.split()
            yield name, url


def test_an_honest_client_gets_through_a_crowd_of_idle_and_deaf_ones(crowded: Any, shared_processes: Any) -> None:
    shared_processes.pull(crowded.url, out="crowded").finish()
    shared_processes.check_same(shared_processes.root / "made" / "crowded", 1, "crowded")
    assert crowded.read_metric("shoal_evicted_total") >= NUM_IDLE // 2
    assert crowded.read_metric("shoal_connections") <= 1024
    status = Path(f"/proc/{crowded.process.pid}/status")
    if status.exists():
        anon = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
        assert int(anon.split()[1]) < ANON_KB


@pytest.mark.parametrize("group", [*GROUPS, "heads", "replays"])
def test_bad_relays_cost_only_themselves(group: str, hostile_relays: HostileRelays, shared_processes: Any) -> None:
    client = hostile_relays.clients[group]
    assert client.finish().splitlines()[-1] == str(shared_processes.data / group / "v1")
    shared_processes.check_same(hostile_relays.path, 1, group)
    assert sorted(item.name for item in (shared_processes.data / group).iterdir()) == [".shardcast", "latest", "v1"]
    assert f"{hostile_relays.honest.url}: " not in client.text, "the honest relay is not blamed"
    assert "hit" not in hostile_relays.witness.text, "a redirect was followed"
    shared_processes.check_untouched()


def test_a_relay_among_all_of_them_passes_on_only_what_was_signed(
    hostile_relays: HostileRelays, shared_processes: Any
) -> None:
    shared_processes.pull(hostile_relays.victim.url, out="below").finish()
    shared_processes.check_same(hostile_relays.path, 1, "below")
    hostile_relays.victim.await_complete(1)
    assert hostile_relays.victim.ask("/versions") == hostile_relays.honest.ask("/versions")
    held = [path.name for path in (shared_processes.data / "victim").glob("v*")]
    assert held == [path.name for path in (shared_processes.data / "honest").glob("v*")]


def test_who_never_reads_is_cut_off_in_the_end(crowded: Any, wait_until: Callable[..., None]) -> None:
    wait_until(lambda: crowded.read_metric("shoal_transfers") == 0, lambda: "end of the connections that never read")
    assert crowded.read_metric("shoal_cut_total") >= NUM_DEAF
