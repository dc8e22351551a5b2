"""A clock that does not jump."""

from pathlib import Path

from shoal.util.clock import LIFE_EVERY_MS, MAX_SLEW_MS, LastAliveFile, SteadyClock, read_clock


class Machine:
    """A wall clock that can be set, and a monotonic clock that cannot."""

    def __init__(self) -> None:
        self.wall_ms, self.pace_ms = 1_700_000_000_000, 5_000

    def pass_time(self, ms: int) -> None:
        self.wall_ms += ms
        self.pace_ms += ms

    def make_clock(self) -> SteadyClock:
        return SteadyClock(lambda: self.wall_ms, lambda: self.pace_ms)


def test_it_follows_the_machine():
    machine = Machine()
    clock = machine.make_clock()
    machine.pass_time(1234)
    assert clock() == machine.wall_ms


def test_a_leap_forth_or_back_changes_nothing():
    for leap_ms in (30 * 86_400_000, -30 * 86_400_000, MAX_SLEW_MS + 1):
        machine = Machine()
        clock, right_ms = machine.make_clock(), machine.wall_ms
        machine.wall_ms += leap_ms
        machine.pass_time(500)
        assert clock() == right_ms + 500
        machine.wall_ms -= leap_ms
        assert clock() == machine.wall_ms


def test_small_steps_are_followed():
    machine = Machine()
    clock = machine.make_clock()
    for _ in range(10):
        machine.wall_ms -= MAX_SLEW_MS
        assert clock() == machine.wall_ms


def test_the_real_clock_has_the_right_time():
    assert abs(SteadyClock()() - read_clock()) < 1000


def test_a_stored_time_is_read_back_and_an_incomplete_one_is_ignored(tmp_path: Path):
    path = tmp_path / "alive"
    assert LastAliveFile(path).read() == 0
    sign = LastAliveFile(path)
    sign.write(1_700_000_000_000)
    sign.write(1_700_000_000_000 + LIFE_EVERY_MS - 1)
    assert LastAliveFile(path).read() == 1_700_000_000_000
    sign.write(1_700_000_000_000 + LIFE_EVERY_MS)
    assert LastAliveFile(path).read() == 1_700_000_000_000 + LIFE_EVERY_MS
    for text in ("", "17x", "9" * 40):
        path.write_text(text)
        assert LastAliveFile(path).read() == 0
