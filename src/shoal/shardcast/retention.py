"""Which versions a store keeps.

- the newest `keep`;
- the newest that is complete: others build on it;
- the way to the newest: the versions by whose deltas it is reached. In the store of a server the way begins at an
  anchor that is complete, so that whoever joins late finds it and every delta since, and the next anchor can be made
  from them. In a client's store it begins at any version that is held, so that a client that fell behind goes on by
  deltas. One that holds nothing of the kind on the way begins at an anchor. What is on a client's way beyond `keep` is
  a manifest and a delta, never a full blob.

The way is at most `MAX_WAY` versions long, whatever the publisher does.
"""

from collections.abc import Callable, Mapping

from shoal.shardcast.entry import Entry

MAX_WAY = 64


def list_kept(entries: Mapping[int, Entry], keep: int, *, serves: bool) -> set[int]:
    """The versions to keep. Among them may be one that is still to come: the first that is missing on the way."""
    complete = [version for version, entry in entries.items() if entry.complete]
    return {*sorted(entries)[-keep:], *sorted(complete)[-1:], *find_way(entries, serves=serves)}


def find_way(entries: Mapping[int, Entry], *, serves: bool) -> set[int]:
    """The versions on the way to the newest, which is one of them."""
    to_held, found = _walk_back(entries, lambda entry: entry.complete and (entry.log.head.anchor or not serves))
    return to_held if found else _walk_back(entries, lambda entry: entry.log.head.anchor)[0]


def _walk_back(entries: Mapping[int, Entry], begins: Callable[[Entry], bool]) -> tuple[set[int], bool]:
    """From the newest version by parents to the first at which the way can begin, and whether there is one."""
    way: set[int] = set()
    version = max(entries, default=None)
    while version is not None and len(way) < MAX_WAY:
        way.add(version)
        entry = entries.get(version)
        if entry is None:
            break
        if begins(entry):
            return way, True
        # Without a delta only its full blob leads to a version.
        version = None if entry.log.delta_settled and entry.log.delta is None else entry.log.head.parent
    return way, False
