"""The beacons of a run: a hash chain whose end is in the genesis and whose values are revealed step by step.

    tip = H(beacon 1), beacon 1 = H(beacon 2), ..., beacon `steps` = H(secret)

Invariants:
- the tip fixes all beacons before the run starts: the coordinator cannot choose one later;
- a revealed beacon says nothing about later ones: nobody can know tasks and seeds before their step opens;
- the secret, which is as it were beacon `steps` + 1, draws which rollouts are checked and which verdicts are doubted,
  and is revealed when the run is finished: then everybody can check how they were drawn;
- task and seeds of a group follow from (beacon, index) by a hash, whoever computes it.

Changing breaks: every group of every run.
"""

import re
from dataclasses import dataclass
from hashlib import sha256

from shoal.errors import ConfigError
from shoal.seeds import derive_seed

SECRET_BYTES = 32
_CHAIN_TAG = b"shoal-beacon-1\n"
_CHECK_TAG = b"shoal-check-1\n"
_SECOND_TAG = b"shoal-second-1\n"
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class GroupSeeds:
    """What a group is made from."""

    task: int
    rollouts: tuple[int, ...]


class BeaconChain:
    """All beacons of a run; held by the coordinator alone."""

    def __init__(self, secret: bytes, steps: int) -> None:
        if len(secret) != SECRET_BYTES:
            raise ConfigError(f"a beacon secret has {SECRET_BYTES} bytes")
        self._secret = secret
        values = [hash_beacon(secret)]
        for _ in range(steps):
            values.append(hash_beacon(values[-1]))
        self._values = values[::-1]  # the tip first, then beacon 1, 2, ...

    @property
    def tip(self) -> str:
        """What stands in the genesis."""
        return self._values[0].hex()

    def reveal_step(self, step: int) -> str:
        """The beacon of a step, 1 .. steps."""
        if not 1 <= step < len(self._values):
            raise ValueError(f"no step {step} in this run")
        return self._values[step].hex()

    def draw_check(self, submission: str, blob: str) -> str:
        """The seed of which rollouts of a submission are checked; it cannot be known before the run is over."""
        return draw_check(self._secret, submission, blob)

    def draw_second(self, submission: str, blob: str) -> int:
        """A number below a million by which second opinions are drawn; it cannot be known before the run is over."""
        return draw_second(self._secret, submission, blob)

    def reveal_secret(self) -> str:
        """The end of the chain, for when the run is finished."""
        return self._secret.hex()


def hash_beacon(value: bytes) -> bytes:
    """One link of the chain."""
    return sha256(_CHAIN_TAG + value).digest()


def check_beacon(beacon: str, earlier: str) -> bool:
    """Whether a beacon is the one that follows `earlier` (the tip, for step 1), in its one spelling."""
    if _HEX.fullmatch(beacon) is None:  # seeds follow from the text: another spelling would be another draw
        return False
    return hash_beacon(bytes.fromhex(beacon)).hex() == earlier


def draw_check(secret: bytes, submission: str, blob: str) -> str:
    """The seed of a check, for who knows the secret."""
    return sha256(_CHECK_TAG + secret + f"{submission} {blob}".encode()).hexdigest()


def draw_second(secret: bytes, submission: str, blob: str) -> int:
    """The draw of a second opinion, for who knows the secret: one is asked for if it is below the share."""
    drawn = sha256(_SECOND_TAG + secret + f"{submission} {blob}".encode()).digest()
    return int.from_bytes(drawn[:8], "big") * 1_000_000 >> 64


def number_beacon(beacon: str) -> int:
    """The beacon as the number that `plan_group` takes."""
    return derive_seed("beacon", beacon)


def derive_group(beacon: str, index: int, group_size: int) -> GroupSeeds:
    """Seeds of the task and the rollouts of group `index`; the same that `plan_group` derives."""
    number = number_beacon(beacon)
    seeds = tuple(derive_seed("rollout", number, index, sample) for sample in range(group_size))
    return GroupSeeds(derive_seed("task", number, index), seeds)
