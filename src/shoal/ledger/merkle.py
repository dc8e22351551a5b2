"""The Merkle tree over a ledger's events: RFC 6962, section 2.1, with SHA-256.

    leaf   SHA-256(0x00 | data)        node   SHA-256(0x01 | left | right)        empty tree   SHA-256("")

A tree of n leaves splits at k, the largest power of two below n. So it consists of complete subtrees, which never
change once they are complete: node (level, p) is the root over leaves [p << level, (p + 1) << level).

- `Frontier` is what a writer keeps of the tree: the roots of its complete subtrees, one per set bit of n. Adding a leaf
  takes two hashes on average, a root log2(n).
- Proofs are built from complete subtrees, wherever they are stored (`NodeSource`), with O(log(n)**2) lookups.
- `verify_*` return False for anything that is not a valid proof, and never raise on input from a peer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

HASH_BYTES = 32
EMPTY_ROOT = sha256(b"").digest()
MAX_PROOF_HASHES = 64
"""Longer than any proof in a tree of countable size."""

NodeSource = Callable[[int, int], bytes]
"""(level, position) -> root of that complete subtree."""


class Subtree(NamedTuple):
    """The root of a complete subtree."""

    level: int
    position: int
    hash: bytes


def hash_leaf(data: bytes) -> bytes:
    """The hash of a leaf."""
    return sha256(b"\x00" + data).digest()


def hash_children(left: bytes, right: bytes) -> bytes:
    """The hash of an inner node."""
    return sha256(b"\x01" + left + right).digest()


@dataclass(frozen=True, slots=True)
class Frontier:
    """A tree of `size` leaves, as the roots of its complete subtrees, largest first."""

    size: int = 0
    peaks: tuple[bytes, ...] = ()

    def grow_leaf(self, leaf: bytes) -> tuple["Frontier", list[Subtree]]:
        """The tree with one more leaf (given by its hash), and the subtrees that this leaf completed."""
        peaks, completed = list(self.peaks), [Subtree(0, self.size, leaf)]
        level, index, current = 0, self.size, leaf
        while index & 1:
            current = hash_children(peaks.pop(), current)
            level, index = level + 1, index >> 1
            completed.append(Subtree(level, index, current))
        return Frontier(self.size + 1, (*peaks, current)), completed

    def compute_root(self) -> bytes:
        """The root of the whole tree."""
        if not self.peaks:
            return EMPTY_ROOT
        root = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            root = hash_children(peak, root)
        return root


def load_frontier(nodes: NodeSource, size: int) -> Frontier:
    """The frontier of the first `size` leaves."""
    levels = [level for level in reversed(range(size.bit_length())) if size >> level & 1]
    return Frontier(size, tuple(nodes(level, (size >> level) - 1) for level in levels))


def root_leaves(leaves: Sequence[bytes]) -> bytes:
    """The root over a list of leaf hashes."""
    frontier = Frontier()
    for leaf in leaves:
        frontier, _ = frontier.grow_leaf(leaf)
    return frontier.compute_root()


def prove_inclusion(nodes: NodeSource, index: int, size: int) -> list[bytes]:
    """The hashes on the path from leaf `index` to the root over `size` leaves: PATH of the RFC."""
    assert 0 <= index < size, "the leaf must be in this tree"
    start, stop, path = 0, size, []
    while stop - start > 1:
        middle = start + _split_size(stop - start)
        if index < middle:
            path.append(_root_range(nodes, middle, stop))
            stop = middle
        else:
            path.append(_root_range(nodes, start, middle))
            start = middle
    return path[::-1]


def prove_consistency(nodes: NodeSource, old_size: int, new_size: int) -> list[bytes]:
    """The hashes that prove that the first `old_size` leaves are those of the older tree: PROOF of the RFC."""
    assert 0 <= old_size <= new_size, "the old tree must not be larger"
    if old_size in (0, new_size):
        return []
    start, stop, path, whole = 0, new_size, [], True
    while old_size != stop:
        middle = start + _split_size(stop - start)
        if old_size <= middle:
            path.append(_root_range(nodes, middle, stop))
            stop = middle
        else:
            path.append(_root_range(nodes, start, middle))
            start, whole = middle, False
    if not whole:  # the verifier knows the older root, but not the root of a part of it
        path.append(_root_range(nodes, start, stop))
    return path[::-1]


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Whether the leaf with this hash is number `index` of the tree with `size` leaves and this root."""
    if not 0 <= index < size or not _is_proof(proof):
        return False
    current, last = leaf, size - 1
    for sibling in proof:
        if last == 0:
            return False
        if index & 1 or index == last:
            current = hash_children(sibling, current)
            while not index & 1 and index:  # a last node without a right sibling moves up unchanged
                index, last = index >> 1, last >> 1
        else:
            current = hash_children(current, sibling)
        index, last = index >> 1, last >> 1
    return last == 0 and current == root


def verify_consistency(old_size: int, old_root: bytes, new_size: int, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """Whether the newer tree begins with all the leaves of the older one."""
    if not 0 <= old_size <= new_size or not _is_proof(proof):
        return False
    if old_size == 0:
        return not proof and old_root == EMPTY_ROOT
    if old_size == new_size:
        return not proof and old_root == new_root
    hashes = list(proof)
    if old_size & (old_size - 1) == 0:  # a complete subtree: its root is the older root itself
        hashes.insert(0, old_root)
    return bool(hashes) and _fold_consistency(old_size - 1, new_size - 1, hashes) == (old_root, new_root)


def _fold_consistency(index: int, last: int, hashes: list[bytes]) -> tuple[bytes, bytes] | None:
    """Both roots computed from a proof; None if the proof has the wrong length."""
    while index & 1:
        index, last = index >> 1, last >> 1
    old = new = hashes[0]
    for sibling in hashes[1:]:
        if last == 0:
            return None
        if index & 1 or index == last:
            old, new = hash_children(sibling, old), hash_children(sibling, new)
            while not index & 1 and index:
                index, last = index >> 1, last >> 1
        else:
            new = hash_children(new, sibling)
        index, last = index >> 1, last >> 1
    return (old, new) if last == 0 else None


def _is_proof(proof: Sequence[bytes]) -> bool:
    return len(proof) <= MAX_PROOF_HASHES and all(len(item) == HASH_BYTES for item in proof)


def _split_size(size: int) -> int:
    """The largest power of two below `size`."""
    return 1 << (size - 1).bit_length() - 1


def _root_range(nodes: NodeSource, start: int, stop: int) -> bytes:
    """The root over leaves [start, stop); start must be a multiple of a power of two that is at least the length."""
    size = stop - start
    if size & (size - 1) == 0:
        level = size.bit_length() - 1
        return nodes(level, start >> level)
    middle = start + _split_size(size)
    return hash_children(_root_range(nodes, start, middle), _root_range(nodes, middle, stop))
