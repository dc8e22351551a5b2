"""The hash chain of beacons, and what is derived from it."""

import hashlib
from itertools import pairwise

import pytest

from shoal.errors import ConfigError
from shoal.protocol.beacon import BeaconChain, check_beacon, derive_group, draw_check, number_beacon
from shoal.seeds import derive_seed

SECRET = bytes(32)


def test_each_beacon_is_the_one_that_the_earlier_one_commits_to():
    chain = BeaconChain(SECRET, 5)
    values = [chain.tip, *(chain.reveal_step(step) for step in range(1, 6)), chain.reveal_secret()]
    assert all(check_beacon(later, earlier) for earlier, later in pairwise(values))
    assert len(set(values)) == 7


def test_a_beacon_has_one_spelling():
    """Seeds derive from its text, so a different spelling would allow another draw."""
    chain = BeaconChain(SECRET, 5)
    beacon = chain.reveal_step(1)
    others = (beacon.upper(), f"{beacon[:2]} {beacon[2:]}", f"{beacon}\n", beacon[:-2], "")
    assert check_beacon(beacon, chain.tip) and not any(check_beacon(other, chain.tip) for other in others)


def test_the_chain_is_a_plain_hash_chain():
    value = SECRET
    for _ in range(3):
        value = hashlib.sha256(b"shoal-beacon-1\n" + value).digest()
    assert BeaconChain(SECRET, 2).tip == value.hex()


@pytest.mark.parametrize("step", [0, 6, -1])
def test_there_is_no_beacon_outside_of_the_run(step):
    with pytest.raises(ValueError, match="no step"):
        BeaconChain(SECRET, 5).reveal_step(step)


def test_a_secret_has_its_length():
    with pytest.raises(ConfigError, match="32 bytes"):
        BeaconChain(b"short", 5)


def test_a_group_is_what_its_plan_derives():
    beacon = BeaconChain(SECRET, 5).reveal_step(2)
    seeds = derive_group(beacon, 7, 3)
    number = number_beacon(beacon)
    assert seeds.task == derive_seed("task", number, 7)
    assert seeds.rollouts == tuple(derive_seed("rollout", number, 7, sample) for sample in range(3))


def test_seeds_differ_by_step_group_and_sample():
    chain = BeaconChain(SECRET, 5)
    seen = [derive_group(chain.reveal_step(step), index, 4) for step in (1, 2, 3) for index in range(20)]
    assert len({seed for group in seen for seed in (group.task, *group.rollouts)}) == 3 * 20 * 5


def test_checks_are_drawn_from_the_secret_and_can_be_checked_when_it_is_out():
    chain = BeaconChain(SECRET, 5)
    drawn = chain.draw_check("s5", "a" * 64)
    assert drawn == draw_check(bytes.fromhex(chain.reveal_secret()), "s5", "a" * 64)
    assert len({drawn, chain.draw_check("s6", "a" * 64), chain.draw_check("s5", "b" * 64)}) == 3
