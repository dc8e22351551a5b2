"""The tree compared with a direct implementation of RFC 6962, and with values computed by hand from its definitions."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.ledger.merkle import (
    EMPTY_ROOT,
    MAX_PROOF_HASHES,
    Frontier,
    Subtree,
    hash_leaf,
    load_frontier,
    prove_consistency,
    prove_inclusion,
    root_leaves,
    verify_consistency,
    verify_inclusion,
)

DATA = [bytes([index]) * index for index in range(70)]
LEAVES = [hash_leaf(data) for data in DATA]


def compute_root(data: list[bytes]) -> bytes:
    """MTH of the RFC, section 2.1."""
    if not data:
        return sha256(b"").digest()
    if len(data) == 1:
        return sha256(b"\x00" + data[0]).digest()
    middle = split(len(data))
    return sha256(b"\x01" + compute_root(data[:middle]) + compute_root(data[middle:])).digest()


def compute_path(index: int, data: list[bytes]) -> list[bytes]:
    """PATH of the RFC, section 2.1.1."""
    if len(data) == 1:
        return []
    middle = split(len(data))
    if index < middle:
        return [*compute_path(index, data[:middle]), compute_root(data[middle:])]
    return [*compute_path(index - middle, data[middle:]), compute_root(data[:middle])]


def compute_proof(size: int, data: list[bytes], *, whole: bool = True) -> list[bytes]:
    """SUBPROOF of the RFC, section 2.1.2."""
    if size == len(data):
        return [] if whole else [compute_root(data)]
    middle = split(len(data))
    if size <= middle:
        return [*compute_proof(size, data[:middle], whole=whole), compute_root(data[middle:])]
    return [*compute_proof(size - middle, data[middle:], whole=False), compute_root(data[:middle])]


def split(size: int) -> int:
    middle = 1
    while middle * 2 < size:
        middle *= 2
    return middle


def nodes(level: int, position: int) -> bytes:
    return compute_root(DATA[position << level : (position + 1) << level])


def test_the_published_hashes_of_an_empty_tree_and_an_empty_leaf() -> None:
    assert EMPTY_ROOT.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert hash_leaf(b"").hex() == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"


def test_the_published_roots_of_small_trees() -> None:
    """The eight leaves and roots with which Certificate Transparency implementations are tested."""
    inputs = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
    roots = [
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
        "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
        "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
        "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
        "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
    ]
    leaves = [hash_leaf(bytes.fromhex(text)) for text in inputs]
    assert [root_leaves(leaves[:size]).hex() for size in range(1, 9)] == roots


def test_leaves_and_inner_nodes_are_distinguished() -> None:
    left, right = LEAVES[0], LEAVES[1]
    assert root_leaves([hash_leaf(left + right)]) != root_leaves([left, right])


def test_the_frontier_gives_the_root_of_every_size() -> None:
    frontier = Frontier()
    for size in range(len(LEAVES)):
        assert frontier.size == size
        assert frontier.compute_root() == compute_root(DATA[:size])
        assert load_frontier(nodes, size) == frontier
        frontier, _ = frontier.grow_leaf(LEAVES[size])


def test_the_frontier_reports_each_complete_subtree_once() -> None:
    frontier, found = Frontier(), []
    for leaf in LEAVES[:64]:
        frontier, completed = frontier.grow_leaf(leaf)
        found += completed
    expected = [Subtree(level, at, nodes(level, at)) for level in range(7) for at in range(64 >> level)]
    assert sorted(found) == expected


def test_inclusion_proofs_are_those_of_the_rfc_and_hold() -> None:
    for size in range(1, 40):
        root = compute_root(DATA[:size])
        for index in range(size):
            proof = prove_inclusion(nodes, index, size)
            assert proof == compute_path(index, DATA[:size])
            assert verify_inclusion(LEAVES[index], index, size, proof, root)


def test_consistency_proofs_are_those_of_the_rfc_and_hold() -> None:
    for new in range(1, 40):
        for old in range(1, new + 1):
            proof = prove_consistency(nodes, old, new)
            assert proof == compute_proof(old, DATA[:new])
            assert verify_consistency(old, compute_root(DATA[:old]), new, compute_root(DATA[:new]), proof)


def test_every_ledger_extends_the_empty_one() -> None:
    assert prove_consistency(nodes, 0, 5) == []
    assert verify_consistency(0, EMPTY_ROOT, 5, compute_root(DATA[:5]), [])
    assert not verify_consistency(0, LEAVES[0], 5, compute_root(DATA[:5]), [])
    assert not verify_consistency(0, EMPTY_ROOT, 5, compute_root(DATA[:5]), [LEAVES[0]])


@st.composite
def changed_proofs(draw: st.DrawFn, proof: list[bytes]) -> list[bytes]:
    """A proof with one hash changed, dropped, duplicated, added, or with two swapped."""
    at = draw(st.integers(0, max(0, len(proof) - 1)))
    bit = draw(st.integers(0, 255))
    flipped = [(int.from_bytes(item) ^ 1 << bit).to_bytes(32) if i == at else item for i, item in enumerate(proof)]
    shapes = [[*proof, LEAVES[0]], [LEAVES[0], *proof]]
    if proof:
        shapes += [flipped, proof[:at] + proof[at + 1 :], proof[: at + 1] + proof[at:]]
    if len(proof) > 1:
        shapes.append(proof[::-1])
    return draw(st.sampled_from([shape for shape in shapes if shape != proof]))


@given(st.data(), st.integers(1, 69))
def test_a_changed_inclusion_proof_does_not_hold(data: st.DataObject, size: int) -> None:
    index = data.draw(st.integers(0, size - 1))
    root, proof = compute_root(DATA[:size]), prove_inclusion(nodes, index, size)
    assert not verify_inclusion(LEAVES[index], index, size, data.draw(changed_proofs(proof)), root)
    other = data.draw(st.integers(0, size - 1).filter(lambda at: at != index)) if size > 1 else 1
    assert not verify_inclusion(LEAVES[index], other, size, proof, root)
    assert not verify_inclusion(hash_leaf(b"other"), index, size, proof, root)


@given(st.data(), st.integers(2, 69))
def test_a_changed_consistency_proof_does_not_hold(data: st.DataObject, new: int) -> None:
    old = data.draw(st.integers(1, new - 1))
    roots = compute_root(DATA[:old]), compute_root(DATA[:new])
    proof = prove_consistency(nodes, old, new)
    assert not verify_consistency(old, roots[0], new, roots[1], data.draw(changed_proofs(proof)))
    assert not verify_consistency(old, hash_leaf(b"other"), new, roots[1], proof)
    assert not verify_consistency(old, roots[0], new, hash_leaf(b"other"), proof)


@given(st.data(), st.integers(2, 69))
def test_no_ledger_that_differs_in_one_old_event_extends(data: st.DataObject, new: int) -> None:
    old = data.draw(st.integers(1, new - 1))
    at = data.draw(st.integers(0, old - 1))
    forged = [*DATA[:at], b"forged", *DATA[at + 1 : new]]
    proof = compute_proof(old, forged)
    assert not verify_consistency(old, compute_root(DATA[:old]), new, compute_root(forged), proof)


@pytest.mark.parametrize(("index", "size"), [(-1, 3), (3, 3), (0, 0), (5, 2), (1 << 70, 1 << 71)])
def test_numbers_that_name_no_leaf_are_no_proof(index: int, size: int) -> None:
    assert not verify_inclusion(LEAVES[0], index, size, LEAVES[:2], compute_root(DATA[:3]))


def test_proofs_of_a_wrong_form_are_refused() -> None:
    root = compute_root(DATA[:3])
    proof = prove_inclusion(nodes, 0, 3)
    assert not verify_inclusion(LEAVES[0], 0, 3, [proof[0][:31], proof[1]], root)
    assert not verify_inclusion(LEAVES[0], 0, 3, [LEAVES[0]] * (MAX_PROOF_HASHES + 1), root)
    assert not verify_consistency(3, root, 2, root, [])
    assert not verify_consistency(-1, root, 2, root, [])
    assert not verify_consistency(1, root, 2, root, [b""])
    assert not verify_consistency(3, root, 5, root, [])
    assert not verify_consistency(3, root, 3, root, [root])


def test_a_proof_holds_only_for_the_size_that_is_stated() -> None:
    """A root can be signed with a size that is not its own; then nothing can be proved against it."""
    pair = root_leaves(LEAVES[:2])
    assert not verify_inclusion(LEAVES[1], 0, 1, [LEAVES[0]], pair)
    assert not verify_inclusion(LEAVES[0], 0, 4, [LEAVES[1]], pair)
    assert not verify_consistency(1, LEAVES[0], 4, pair, [LEAVES[1]])
    four = root_leaves(LEAVES[:4])
    assert not verify_consistency(1, LEAVES[0], 2, four, prove_consistency(nodes, 1, 4))
