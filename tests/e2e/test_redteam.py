"""The red team in short: a tiny swarm, a campaign with some attacks of each kind, and their outcomes in the ledger.

`shoal redteam` does the same with all attacks. The expected outcomes are in the registry, and are enforced here.
"""

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.fixtures.paths import TINY, WIDE

from shoal.identity.keys import Key
from shoal.redteam.campaign import read_attempts
from shoal.redteam.ledger_summary import read_ledger_summary
from shoal.redteam.matrix import Matrix, build_matrix
from shoal.redteam.registry import Expected, list_attacks

sys.path.insert(0, str(Path(__file__).parent))

from warm import PATIENCE_S, Warm

SHORT = ("int8", "copy_all", "flipped_reward", "padding", "garbage", "two_manifests", "noise")
"""None that is fruitless: those use up the time of a campaign; tests/redteam/test_scripted.py runs them."""
LONG = (
    *("small", "stale", "greedy", "edited_tokens", "foreign_text", "constant_proof", "truncation"),
    *("bomb_pages", "signatures", "cherry_leases"),
)
# The learning rate keeps the policy as it is. One that has learned to give a single answer writes the same tokens at
# any temperature, and cheats submit honest work.
SETTINGS = (
    *("steps=5000", "async_level=2", "policy.tiny.layers=2", WIDE, "learner.lr=1e-5", "engine.max_tokens=10"),
    *(
        "swarm.calibration=128",
        "swarm.workers=1",
        "swarm.groups_per_lease=4",
        "swarm.heartbeat_s=1",
        "swarm.trial_max_s=0",
        "swarm.lease_s=10",
    ),
    *("eval.tasks=1", "eval.samples=1", "eval.k=1", "eval.every=0", "checkpoint.every=500"),
)
CAMPAIGN = ("--abreast", 4, "--submissions", 4, "--seconds", 60, "--slots", 64)
pytestmark = pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="a part ends with its supervisor on Linux alone"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test of a campaign runs on that of `SHORT` and, in the long form, on that of `LONG`."""
    if "name" in metafunc.fixturenames:
        cases = [(SHORT, name) for name in SHORT]
        cases += [pytest.param(LONG, name, marks=pytest.mark.long) for name in LONG]
        metafunc.parametrize(("tried", "name"), cases, indirect=["tried"], ids=(*SHORT, *LONG), scope="module")
    elif "tried" in metafunc.fixturenames:
        metafunc.parametrize(
            "tried", [SHORT, pytest.param(LONG, marks=pytest.mark.long)], indirect=True, ids=["short", "long"]
        )


@pytest.fixture(scope="module")
def tried(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The attacks of a campaign."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tried: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("redteam")


@pytest.fixture(scope="module")
def verified(folder: Path, matrix: Matrix) -> str:
    """The output for the owner that checked its work again."""
    return (folder / "verified").read_text()


@pytest.fixture(scope="module")
def matrix(folder: Path, tried: tuple[str, ...], warm: Warm) -> Matrix:
    """The outcomes of all attempts in one swarm."""
    root, log = folder / "tiny-seed0", folder / "printed"
    settings = [str(TINY), f"out={folder}", *SETTINGS]
    assert warm.start("prepare", *settings, out=log, err=log).wait() == 0, log.read_text()
    swarm = warm.start("run", *settings, out=log, err=log)
    flags = (*CAMPAIGN, "--attack", *tried, "--folder", folder / "campaign")
    campaign = warm.start("redteam", "campaign", wait_url(root), *flags, out=log, err=log)
    assert campaign.wait() == 0, log.read_text()[-4000:]
    verify_newest(warm, wait_url(root), root / "worker-1", folder / "verified")
    swarm.send_signal(signal.SIGINT)
    assert swarm.wait() == 130, log.read_text()[-4000:]
    honest = {Key.load(root / "worker-1" / "owner.key").public: "worker-1"}
    return build_matrix(
        read_ledger_summary(root / "coordinator" / "ledger.db"),
        read_attempts(folder / "campaign"),
        honest=honest,
        liars={},
    )


def verify_newest(warm: Warm, url: str, node: Path, said: Path) -> None:
    """An owner repeats the check of its newest decided submission, while its weights are kept."""
    names = sorted((path.stem for path in (node / "receipts").glob("s*.json")), key=lambda name: int(name[1:]))
    for name in reversed(names[-8:]):
        code = warm.start("verify", url, name, "--folder", node, out=said, err=said).wait()
        if "undecided" not in said.read_text():
            break
        said.unlink()
    said.write_text(f"{said.read_text()}\nexit code {code}\n")


def wait_url(root: Path) -> str:
    """The coordinator's address, as soon as it serves."""
    descriptor, deadline = root / "coordinator" / "descriptor.json", time.monotonic() + PATIENCE_S
    while not descriptor.exists():
        assert time.monotonic() < deadline, "no coordinator was started"
        time.sleep(0.05)
    return f"http://127.0.0.1:{json.loads((root / 'launch' / 'ports.json').read_bytes())['coordinator']}"


def test_the_attacks_are_some_of_each_fate() -> None:
    assert {list_attacks()[name].expect for name in SHORT} == set(Expected) - {Expected.FRUITLESS}
    assert list_attacks()["cherry_leases"].expect == Expected.FRUITLESS


def test_an_attack_meets_its_fate(matrix: Matrix, name: str) -> None:
    (row,) = [row for row in matrix.rows if row.name == name]
    (outcome,) = row.outcomes
    assert not outcome.fault, f"{outcome.fault}; {outcome.attempt}"
    assert row.caught == (row.expect in (Expected.HARD, Expected.SOFT, Expected.FORM))


def test_the_honest_worker_is_not_harmed(matrix: Matrix) -> None:
    assert matrix.honest.rollouts > 0 and not matrix.honest.alarms and not matrix.honest.punished
    assert matrix.honest.ratios == {"worker-1": 1.0}


def test_the_same_evidence_gives_an_owner_the_same_numbers(verified: str) -> None:
    assert verified.endswith("exit code 0\n"), verified
    assert " equal" in verified and "DIFFERS" not in verified, verified


def test_nothing_is_wrong_with_the_ledger(matrix: Matrix) -> None:
    assert matrix.holds and not matrix.faults, matrix.faults
