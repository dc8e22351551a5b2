"""The beacons of a run: a hash chain whose end is in the genesis and whose values are revealed step by step.

    tip = H(beacon 1), beacon 1 = H(beacon 2), ..., beacon `steps` = H(secret)

Invariants:
- the tip fixes all beacons before the run starts: the coordinator cannot choose one later;
- a step's beacon is revealed when its batch is cut, and steps are cut in order. Until then a lease reveals the seeds of
  its own groups: nobody can compute a group before it was granted. Afterwards everyone can check all seeds of the step;
- the secret, in effect beacon `steps` + 1, determines which rollouts are checked and which verdicts get a second
  opinion. It is revealed when the run is finished: then everyone can check these draws;
- task and seeds of a group follow from (beacon, index) by a hash, so everyone computes the same.

Seals of canaries are the other commitment of a run: an owner known only to the operator, recorded before it joins.

    seal = SHA-256("shoal-canary-1\\n" | owner | the owner's signature of the run's name, tag CANARY)

- a seal reveals nothing: only the owner can make the signature, so nobody can test whether an owner matches a seal;
- a seal opens for one owner only, and only with that owner's key: work of another owner can neither be declared a
  canary nor be treated as one;
- a seal is valid for one run.

Changing breaks: every group of every run, and seals that are not opened yet.
"""

import re
from hashlib import sha256

from shoal.errors import ConfigError
from shoal.identity.documents import Tag, sign_bytes, verify_bytes
from shoal.identity.keys import Key
from shoal.seeds import GroupSeeds, derive_group_seeds, derive_seed
from shoal.util.canonical import encode_canonical

SECRET_BYTES = 32
_CHAIN_TAG = b"shoal-beacon-1\n"
_CHECK_TAG = b"shoal-check-1\n"
_SECOND_TAG = b"shoal-second-1\n"
_HEX = re.compile(r"[0-9a-f]{64}")


class BeaconChain:
    """All beacons of a run; known to the coordinator alone."""

    def __init__(self, secret: bytes, steps: int) -> None:
        if len(secret) != SECRET_BYTES:
            raise ConfigError(f"invalid beacon secret: must have {SECRET_BYTES} bytes")
        self._secret = secret
        values = [hash_beacon(secret)]
        for _ in range(steps):
            values.append(hash_beacon(values[-1]))
        self._values = values[::-1]  # the tip first, then beacon 1, 2, ...

    @property
    def tip(self) -> str:
        """The commitment in the genesis."""
        return self._values[0].hex()

    def reveal_step(self, step: int) -> str:
        """The beacon of a step, 1 .. steps."""
        if not 1 <= step < len(self._values):
            raise ValueError(f"no step {step} in this run")
        return self._values[step].hex()

    def reveal_groups(self, step: int, first: int, count: int, group_size: int) -> tuple[str, ...]:
        """The seeds of groups first .. first + count - 1 of a step, for those that hold or judge them."""
        beacon = self.reveal_step(step)
        return tuple(show_seeds(derive_group(beacon, index, group_size)) for index in range(first, first + count))

    def draw_check(self, submission: str, blob: str) -> str:
        """The seed that selects which rollouts of a submission are checked; unpredictable until the run is over."""
        return draw_check(self._secret, submission, blob)

    def draw_second(self, submission: str, blob: str) -> int:
        """A number below a million that decides on a second opinion; unpredictable until the run is over."""
        return draw_second(self._secret, submission, blob)

    def reveal_secret(self) -> str:
        """The end of the chain, revealed when the run is finished."""
        return self._secret.hex()


def hash_beacon(value: bytes) -> bytes:
    """One link of the chain."""
    return sha256(_CHAIN_TAG + value).digest()


def check_beacon(beacon: str, earlier: str) -> bool:
    """Whether a beacon is the one that follows `earlier` (the tip, for step 1), in its canonical spelling."""
    if _HEX.fullmatch(beacon) is None:  # seeds derive from the text: a different spelling would give different seeds
        return False
    return hash_beacon(bytes.fromhex(beacon)).hex() == earlier


def draw_check(secret: bytes, submission: str, blob: str) -> str:
    """The seed of a check, given the secret."""
    return sha256(_CHECK_TAG + secret + f"{submission} {blob}".encode()).hexdigest()


def draw_second(secret: bytes, submission: str, blob: str) -> int:
    """The draw for a second opinion, given the secret: one is requested if the draw is below the share."""
    drawn = sha256(_SECOND_TAG + secret + f"{submission} {blob}".encode()).digest()
    return int.from_bytes(drawn[:8], "big") * 1_000_000 >> 64


def number_beacon(beacon: str) -> int:
    """The beacon as the number that `plan_group` takes."""
    return derive_seed("beacon", beacon)


def derive_group(beacon: str, index: int, group_size: int) -> GroupSeeds:
    """Seeds of the task and the rollouts of group `index`; the same as `plan_group` derives."""
    return derive_group_seeds(number_beacon(beacon), index, group_size)


def show_seeds(seeds: GroupSeeds) -> str:
    """The seeds of a group as a message has them: 16 hex digits for the task, then for each rollout."""
    return "".join(f"{seed:016x}" for seed in (seeds.task, *seeds.rollouts))


def read_seeds(text: str) -> GroupSeeds:
    """The opposite of `show_seeds`, for a text that its message has checked."""
    task, *rollouts = (int(text[place : place + 16], 16) for place in range(0, len(text), 16))
    return GroupSeeds(task, tuple(rollouts))


_SEAL_TAG = b"shoal-canary-1\n"


def sign_seal(owner: Key, run: str) -> str:
    """The signature that opens an owner's seal, in hex; secret until then."""
    return sign_bytes(owner, Tag.CANARY, _frame_run(run)).hex()


def make_seal(owner: Key, run: str) -> str:
    """The seal of an owner, in hex."""
    return _hash_seal(owner.public, sign_seal(owner, run))


def find_seal(run: str, owner: str, signature: str) -> str | None:
    """The seal that a signature opens; None if the owner did not make the signature."""
    is_signed = verify_bytes(owner, Tag.CANARY, _frame_run(run), bytes.fromhex(signature))
    return _hash_seal(owner, signature) if is_signed else None


def _frame_run(run: str) -> bytes:
    return encode_canonical({"run": run})


def _hash_seal(owner: str, signature: str) -> str:
    return sha256(_SEAL_TAG + bytes.fromhex(owner) + bytes.fromhex(signature)).hexdigest()
