"""Evidence against an owner: it is always fair to honest ones, and it finds the others."""

import heapq
import random
from collections import Counter
from fractions import Fraction
from itertools import permutations
from math import comb
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.drift import (
    BINS,
    BY_PART,
    FRACTIONS,
    LEAST_BAG,
    MAX_BAG,
    MOST_EVIDENCE,
    NUM_LEVELS,
    RANKED,
    UNIT,
    DriftEvidence,
    DriftLevel,
    DriftStream,
    PopulationSamples,
    line_evidence,
    read_wealth,
    stake_money,
)
from shoal.protocol.params import MILLION, RunParams

LINE = line_evidence(RunParams().watch_rate)
DRAW = st.integers(0, 2**64 - 1)


def draw_ties(rng):
    return [rng.getrandbits(64) for _ in RANKED]


def make_evidence(held=0):
    return DriftEvidence(wealth={stream: [held] * len(own) for stream, own in DriftEvidence().wealth.items()})


# Each bet is fair


@given(st.integers(0, 2**90), st.integers(1, 10**6))
def test_no_bet_on_a_rank_gains_on_average(held, before):
    """Over all parts, which are equally likely, the mean wealth after a bet is at most the wealth and stake before."""
    ends = []
    for part in range(BINS):
        evidence = make_evidence(held)
        evidence.groups = before - 1
        evidence.weigh_group([part] * len(RANKED))
        ends.append([own for stream in RANKED for own in evidence.wealth[stream]])
    for bet in zip(*ends, strict=True):
        assert sum(bet) <= BINS * (held + stake_money(before))


def test_nearly_nothing_is_lost_by_rounding():
    for odds in zip(*BY_PART, strict=True):
        assert 0 <= (BINS << 32) - sum(odds) <= BINS


@given(st.integers(0, 2**70), st.integers(1, MILLION), st.integers(0, 6), st.integers(0, NUM_LEVELS - 1))
def test_no_bet_on_drift_gains_on_average_where_a_level_is_exceeded_as_often_as_it_may_be(held, chance, chunks, level):
    share, mean = Fraction(chance, MILLION), [Fraction(0)] * (NUM_LEVELS * len(FRACTIONS))
    for above in range(chunks + 1):
        evidence = make_evidence(held)
        evidence.weigh_drift([DriftLevel(level, chance, chunks, above)])
        weight = comb(chunks, above) * share**above * (1 - share) ** (chunks - above)
        mean = [total + weight * own for total, own in zip(mean, evidence.wealth[DriftStream.DRIFT], strict=True)]
    assert all(total <= held + stake_money(1) for total in mean)


def test_a_bet_on_drift_pays_what_its_odds_say():
    evidence = make_evidence(UNIT)
    evidence.weigh_drift([DriftLevel(1, 100_000, 10, 3)])
    for fraction, own in zip(FRACTIONS, evidence.wealth[DriftStream.DRIFT][len(FRACTIONS) :], strict=False):
        share = fraction[0] / fraction[1]
        wanted = (1 + stake_money(1) / UNIT) * (1 + share * 9) ** 3 * (1 - share) ** 7
        assert own / UNIT == pytest.approx(wanted, rel=1e-6)


def test_what_was_lost_to_the_last_bit_is_not_won_back():
    """Full chunks and short ones bet on one level in turn: after many below it nothing is left to bet."""
    evidence = DriftEvidence()
    evidence.weigh_drift([DriftLevel(0, 100_000, 1000, 0), DriftLevel(0, 100_000, 60, 60)])
    assert evidence.wealth[DriftStream.DRIFT][: len(FRACTIONS)] == [0] * len(FRACTIONS) and evidence.peak < MILLION


def test_all_money_that_is_ever_staked_makes_one():
    staked = 0
    for number in range(1, 1 << 17):
        staked += stake_money(number)
    assert staked <= UNIT
    assert UNIT - staked <= UNIT // 18 + (1 << 17)


def test_what_a_validator_counts_costs_the_same_however_much_it_is():
    for above in (0, 1 << 23, 1 << 24):
        evidence = DriftEvidence()
        evidence.weigh_drift([DriftLevel(level, 1, 1 << 24, above) for level in (0, 1, 2, 3, 0, 1, 2, 3)])
        assert evidence.peak <= MOST_EVIDENCE


# Ranks


def test_ranks_are_uniform_and_independent_of_those_before():
    """Over all orders of five values: the ranks of the fourth and fifth take each pair equally often."""
    pairs = Counter()
    for order in permutations((10, 20, 30, 40, 50)):
        bag = PopulationSamples()
        parts = [bag.place([value] * 3, [0] * 3) for value in order]
        assert parts[:LEAST_BAG] == [None] * LEAST_BAG
        pairs[parts[3][0], parts[4][0]] += 1
    assert len(pairs) == 4 * 5
    assert set(pairs.values()) == {120 // 20}


@given(st.lists(st.integers(0, 3), min_size=LEAST_BAG + 1, max_size=12), DRAW)
def test_ties_are_spread_over_all_the_ranks_that_they_share(values, draw):
    bag = PopulationSamples()
    for value in values[:-1]:
        bag.place([value] * 3, [0] * 3)
    (part, *_), last = bag.place([values[-1]] * 3, [draw] * 3), values[-1]
    low, high = sum(value < last for value in values), sum(value <= last for value in values)
    assert BINS * low // len(values) <= part <= BINS * high // len(values)
    exact = Fraction(low) + Fraction(draw, 2**64) * (high - low)
    assert part == int(BINS * exact / len(values))


def test_a_bag_that_is_full_begins_again():
    bag = PopulationSamples()
    for number in range(MAX_BAG):
        bag.place([number] * 3, [0] * 3)
    assert len(bag.values[0]) == MAX_BAG
    assert bag.place([5] * 3, [0] * 3) is None
    assert bag.values == [[5]] * 3


def test_stored_evidence_continues_as_if_it_had_not_been_stored():
    rng, evidence = random.Random(1), DriftEvidence()
    for _ in range(50):
        evidence.weigh_group([rng.randrange(BINS) for _ in RANKED])
    evidence.weigh_drift([DriftLevel(0, 300_000, 7, 4)])
    stored = DriftEvidence(
        evidence.groups, evidence.submissions, read_wealth(evidence.to_text()), evidence.peak, evidence.leader
    )
    for one in (evidence, stored):
        one.weigh_group([63, 0, 5])
    assert stored == evidence


# Swarms


class Swarm:
    """Owners of different speed that lease groups, wait as long as these take, and lose the slowest to a backup."""

    def __init__(self, speeds, *, seed, write=None, by_author=False):
        self.rng, self.speeds, self.by_author = random.Random(seed), speeds, by_author
        self.write = write or (lambda owner, numbers, rng: numbers)
        self.evidence = [DriftEvidence() for _ in speeds]
        self.watched = {}

    def run(self, versions, groups, line=LINE):
        """Each version has a step; watched owners are not weighed any more."""
        for _ in range(versions):
            bag = PopulationSamples()
            for holder, author, numbers in self._write_step(groups):
                owner = author if self.by_author else holder
                if owner in self.watched:
                    continue
                parts = bag.place(numbers, draw_ties(self.rng))
                if parts is not None:
                    self.evidence[owner].weigh_group(parts)
                    if self.evidence[owner].peak >= line:
                        self.watched[owner] = self.evidence[owner].groups
        return self.watched

    def _write_step(self, groups):
        """Groups of a step in order of index: first lessee, author, and numbers of each."""
        clock = [(self.rng.random(), owner) for owner in range(len(self.speeds))]
        heapq.heapify(clock)
        done = []
        for _ in range(groups):
            time, owner = heapq.heappop(clock)
            numbers = draw_numbers(self.rng)
            took = numbers[0] / self.speeds[owner]
            author = owner
            if took > 1500:  # its lease ends, and the fastest owner does it
                took, author = 1500, max(range(len(self.speeds)), key=self.speeds.__getitem__)
            heapq.heappush(clock, (time + took, owner))
            done.append((owner, author, self.write(author, numbers, self.rng)))
        return done


def draw_numbers(rng):
    """A group of 8 rollouts: tokens, mean reward and entropy in millionths; hard tasks give long rollouts."""
    hard = rng.gauss(0, 1)
    tokens = round(600 * 2.718 ** (0.35 * hard + rng.gauss(0, 0.15)))
    chance = 1 / (1 + 2.718 ** (1.2 * hard))
    reward = sum(rng.random() < chance for _ in range(8)) * 125_000
    return tokens, reward, round(MILLION * rng.gauss(0.7 + 0.05 * hard, 0.1))


def test_honest_owners_are_watched_no_more_often_than_the_rate_says_whatever_their_speed():
    """Forty swarms, in which some owners generate a hundred times as much as others, checked after each group."""
    rate, swarms, owners = 200_000, 40, 8
    found = 0
    for seed in range(swarms):
        speeds = [0.4 * 1.6**place for place in range(owners)]
        found += len(Swarm(speeds, seed=seed).run(5, 80, line_evidence(rate)))
    assert found <= rate * swarms * owners // MILLION
    assert found > 0, "a rate that is never reached would test nothing"


def test_a_slow_owner_would_be_known_by_its_short_groups_if_those_that_it_lost_did_not_count():
    speeds = [0.45, 1, 1, 1, 1, 2]
    assert Swarm(speeds, seed=1).run(15, 80) == {}
    assert 0 in Swarm(speeds, seed=1, by_author=True).run(15, 80)


def cut_short(owner, numbers, rng):
    return (round(0.8 * numbers[0]), *numbers[1:]) if owner == 0 else numbers


def take_best(owner, numbers, rng):
    """The better of two, for each failed rollout."""
    if owner:
        return numbers
    fails = 8 - numbers[1] // 125_000
    return numbers[0], numbers[1] + 125_000 * sum(rng.random() < 0.5 for _ in range(fails)), numbers[2]


def take_likeliest(owner, numbers, rng):
    return (*numbers[:2], numbers[2] // 4) if owner == 0 else numbers


@pytest.mark.parametrize(
    ("write", "most", "leader"),
    [(cut_short, 150, "length"), (take_best, 80, "reward"), (take_likeliest, 12, "entropy")],
)
def test_an_owner_with_different_work_is_watched_within_so_many_groups(write, most, leader):
    """And no other owner is. The figures are in docs/validation.md."""
    needed = []
    for seed in range(5):
        swarm = Swarm([1.0] * 6, seed=seed, write=write)
        watched = swarm.run(16, 80)
        assert set(watched) == {0}
        assert swarm.evidence[0].leader == leader
        needed.append(watched[0])
    assert median(needed) <= most


def test_a_change_that_comes_late_is_found_nearly_as_soon():
    rng, evidence, bag = random.Random(2), DriftEvidence(), PopulationSamples()
    for number in range(1000):
        parts = bag.place(draw_numbers(rng), draw_ties(rng))
        if number >= LEAST_BAG and number % 2:
            evidence.weigh_group(parts)
    assert evidence.peak < LINE
    late = 0
    while evidence.peak < LINE:
        evidence.weigh_group([0, rng.randrange(BINS), rng.randrange(BINS)])
        late += 1
    assert late <= 12


def test_a_majority_of_cheats_looks_normal_and_makes_the_others_look_odd_which_costs_them_checks_alone():
    """The others lose nothing by it: being watched is the only consequence of the rule."""

    def shorten(owner, numbers, rng):
        return (numbers[0] // 2, *numbers[1:]) if owner else numbers

    assert 0 in Swarm([1.0] * 6, seed=3, write=shorten).run(10, 80)


def test_work_that_drifts_a_little_more_than_honest_work_is_found():
    """Levels are exceeded by one chunk in six instead of one in ten."""
    rng, evidence = random.Random(4), DriftEvidence()
    while evidence.peak < LINE:
        above = sum(rng.random() < 1 / 6 for _ in range(20))
        evidence.weigh_drift([DriftLevel(2, 100_000, 20, above)])
    assert evidence.leader == "drift"
    assert evidence.submissions <= 40


def test_work_that_drifts_as_honest_work_may_is_not():
    rng, peaks = random.Random(5), []
    for _ in range(50):
        evidence = DriftEvidence()
        for _ in range(40):
            above = sum(rng.random() < 0.1 for _ in range(20))
            evidence.weigh_drift([DriftLevel(2, 100_000, 20, above)])
        peaks.append(evidence.peak)
    assert max(peaks) < LINE
