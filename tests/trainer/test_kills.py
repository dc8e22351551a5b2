"""kill -9 of a trainer at any of its writes, repeatedly, with the bits of `shoal train` in the end."""

import subprocess
import sys
from pathlib import Path

import pytest
from fake_swarm import FakeSwarm, assert_whole

KILLER = """
import itertools, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from fake_swarm import FakeSwarm, make_config, run_life  # here, so that the children need not
import shoal.train.sft

def die_at(point):
    left = itertools.count(point, -1)
    def wrap(function):
        def wrapped(*args, **options):
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)
        return wrapped
    os.fsync, os.rename, os.replace = wrap(os.fsync), wrap(os.rename), wrap(os.replace)

killed = 0
for point in [int(text) for text in sys.argv[1].split(",")]:
    child = os.fork()
    if child == 0:
        swarm = FakeSwarm(Path(sys.argv[3]) / "swarm", Path(sys.argv[4]))
        swarm.has_start = False
        die_at(point)
        run_life(make_config(Path(sys.argv[3]), "async_level=1", "checkpoint.every=2"), swarm)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        killed += 1
    elif os.WEXITSTATUS(status):
        sys.exit(100 + os.WEXITSTATUS(status))
sys.exit(killed)
"""


# Each process dies at its n-th fsync or rename: SFT, checkpoints, versions, batches, metrics, the ledger.
SOME = (3, 40, 22, 13)
OTHERS = (9, 35, 17, 28, 38, 31, 25, 11, 19, 33, 27)


@pytest.mark.parametrize("points", [SOME, pytest.param(OTHERS, marks=pytest.mark.long)])
def test_a_trainer_killed_at_every_kind_of_write_resumes_to_the_same_bits(
    tmp_path: Path, lagging: Path, points: tuple[int, ...]
) -> None:
    here = str(Path(__file__).parent)
    numbers = ",".join(str(point) for point in (*points, 10**6))
    command = [sys.executable, "-c", KILLER, numbers, here, str(tmp_path), str(lagging)]
    process = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert len(points) / 2 <= process.returncode < 100, process.stderr
    swarm = FakeSwarm(tmp_path / "swarm", lagging)
    assert_whole(tmp_path / "tiny-seed0", swarm)
