"""The directory of one run, `<out>/<name>-seed<seed>/`, and the rules for reopening it.

    config.toml     the resolved configuration, written first
    metrics.jsonl   one line per report: {"step": n, "time": unix seconds, name: value, ...}
    checkpoints/    rollouts/step-000012.parquet    log.txt    .lock

Invariants:
- one live process at a time has a run directory open (flock on `.lock`, released by the kernel when the process ends);
- a directory with results has one configuration: opening it with another is refused, except for keys in `RESUMABLE`;
- after `truncate_after(n)` it contains no step beyond n, so a resumed run contains no step twice;
- metrics are finite: NaN and infinities, which JSON lacks, are written as null and counted in `nonfinite`.

Life cycle: open -> link -> truncate_after(resumed step) -> append_metrics ... -> close.
"""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from shoal.config.run import RunConfig, dump_config, flatten_config, load_config
from shoal.errors import ConfigError, DiskError
from shoal.util.disk import is_full, is_refused, spare_words
from shoal.util.files import (
    LOCK_NAME,
    append_line,
    check_latest,
    is_same_file,
    link_latest,
    open_lock,
    read_accounts,
    repair_jsonl,
    sweep_leftovers,
    try_lock,
    write_atomic,
    write_owner,
)

RESUMABLE = (
    "out",
    "steps",
    "rollouts",
    "eval.every",
    "checkpoint.every",
    "checkpoint.keep",
    "track.name",
    "track.project",
)
"""Keys that may differ when a run is resumed: none of them changes what any training step computes.

`threads` is not among them: it changes the order of summation and so the last bits of every step. The stored value is
the number in use, never the 0 that stands for all cores. `eval.tasks`, `eval.samples` and `eval.k` are not either: one
metrics file holds one kind of pass rate. Nor is `steps` with a `beacon`: a chain of beacons is as long as its run, and
another length has other beacons.
"""

_WAY_OUT = "use --fresh to move it aside, or another name or seed"
_FILES, _FOLDERS = ("metrics.jsonl", "log.txt"), ("checkpoints", "rollouts")
_ROLLOUTS_NAME = re.compile(r"step-(\d+)\.parquet")


def run_path(config: RunConfig) -> Path:
    """The directory of the run with this configuration."""
    return Path(config.out).expanduser() / f"{config.name}-seed{config.seed}"


def find_conflict(path: Path, config: RunConfig) -> str | None:
    """Why a run directory cannot be resumed with this configuration; None if it can, or is new."""
    if not is_started(path):
        return None
    stored_path = path / "config.toml"
    if not stored_path.exists():
        return f"{path}: has a run but no config.toml; {_WAY_OUT}"
    try:
        stored = load_config(stored_path)
    except ConfigError as error:
        return f"{path}: has a configuration that this version cannot read ({' '.join(str(error).split())}); {_WAY_OUT}"
    old, new = flatten_config(stored), flatten_config(config)
    free = set(RESUMABLE) - ({"steps"} if config.beacon else set())
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key not in free)
    if config.threads == 0 and "threads" in changed:
        changed.remove("threads")  # a dry run does not know the number yet
    if not changed:
        return None
    if changed == ["tasks.code_hash"]:
        code = config.tasks.reward or config.tasks.environment
        return (
            f"{path}: the source file of {code} has changed since the run started; restore it to resume, or {_WAY_OUT}"
        )
    shown = ", ".join(f"{key} = {json.dumps(old.get(key))}" for key in changed[:3])
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{path}: holds a run with other settings ({shown}{more}); use those to resume it, or {_WAY_OUT}"


def is_started(path: Path) -> bool:
    """Whether a run directory has results: a metrics line or a checkpoint. Until then its settings may change."""
    metrics, checkpoints = path / "metrics.jsonl", path / "checkpoints"
    has_metrics = metrics.exists() and metrics.stat().st_size > 0
    return has_metrics or (checkpoints.exists() and any(checkpoints.iterdir()))


def is_swarms(path: Path) -> bool:
    """Whether a run directory belongs to a swarm's trainer, which publishes versions from there."""
    return (path / "versions").exists()


def check_config(config: RunConfig) -> None:
    """Refuse settings that contradict those of the run that its directory holds."""
    path = run_path(config)
    with _explain_os_errors(path):
        if (conflict := find_conflict(path, config)) is not None:
            raise ConfigError(conflict)


class RunDir:
    """An open run directory. Only this process appends metrics, until `close` or its end."""

    def __init__(self, path: Path, lock: int, clock: Callable[[], float]) -> None:
        self.path = path
        self._lock = lock
        self._clock = clock

    @classmethod
    def open(cls, config: RunConfig, fresh: bool = False, clock: Callable[[], float] = time.time) -> "RunDir":
        """Create the directory or open it to resume; `fresh` first moves an existing one aside to `<dir>.old-<n>`."""
        path = run_path(config)
        with _explain_os_errors(path):
            lock = lock_dir(path)
            try:
                if fresh and any(entry.name != ".lock" for entry in path.iterdir()):
                    lock = _start_afresh(path, lock)
                if (conflict := find_conflict(path, config)) is not None:
                    raise ConfigError(conflict)
                _fill_dir(path, config)
            except BaseException:
                _remove_unused(path)
                os.close(lock)
                raise
        return cls(path, lock, clock)

    def link(self) -> None:
        """Point `latest` to this run. Not before the run is usable: until then `latest` is another run."""
        link_latest(self.path)

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log_path(self) -> Path:
        return self.path / "log.txt"

    def rollouts_path(self, step: int) -> Path:
        """The file for the rollouts trained in one step."""
        return self.path / "rollouts" / f"step-{step:06d}.parquet"

    def append_metrics(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Append one line to metrics.jsonl; durable when this returns."""
        append_metrics(self.metrics_path, step, metrics, self._clock)

    def truncate_after(self, step: int) -> None:
        """Drop metrics lines and rollout files of later steps, which a resumed run will write again; -1 drops all."""
        cut_metrics(self.metrics_path, step)
        for file in (self.path / "rollouts").iterdir():
            match = _ROLLOUTS_NAME.fullmatch(file.name)
            if match is not None and int(match[1]) > step:
                file.unlink()

    def close(self) -> None:
        """Let other processes open the directory; one without results is removed. Closing twice is harmless."""
        if self._lock >= 0:
            _remove_unused(self.path)
            os.close(self._lock)
            self._lock = -1


def cut_metrics(path: Path, step: int) -> None:
    """Drop the lines of later steps from a metrics file; -1 drops all."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for number, line in enumerate(lines, 1) if _read_step(path, line, number) <= step]
    if len(kept) < len(lines):
        write_atomic(path, b"".join(kept))


def _read_step(path: Path, line: bytes, number: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: line {number} is not a metrics line; {_WAY_OUT}") from None


def append_metrics(
    path: Path, step: int, metrics: Mapping[str, float | None], clock: Callable[[], float] = time.time
) -> None:
    """Append one line of metrics to a file that only this process writes; durable when this returns."""
    assert not {"step", "time", "nonfinite"} & metrics.keys(), "reserved metric names"
    values = {name: _finite_or_none(value) for name, value in metrics.items()}
    num_lost = sum(values[name] is None and metrics[name] is not None for name in metrics)
    line = {"step": step, "time": round(clock(), 3)} | values | ({"nonfinite": num_lost} if num_lost else {})
    append_line(path, json.dumps(line, allow_nan=False))


def _finite_or_none(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    # numpy and torch scalars pass as floats, but JSON does not support them.
    return value if isinstance(value, int) else float(value)


@contextlib.contextmanager
def _explain_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"{error.filename or path}: cannot be used for the run: {error.strerror}"
        raise (DiskError(text, is_full=True) if is_full(error) else ConfigError(text)) from None


def _fill_dir(path: Path, config: RunConfig) -> None:
    text = dump_config(config).encode()
    config_path = path / "config.toml"
    # Written first: a directory with metrics but without it is not a run of ours.
    if not config_path.exists() or config_path.read_bytes() != text:
        write_atomic(config_path, text)
    for name in _FOLDERS:
        (path / name).mkdir(exist_ok=True)
        sweep_leftovers(path / name)
    sweep_leftovers(path)
    for name in _FILES:
        (path / name).touch()
        repair_jsonl(path / name)
    check_latest(path)


def _remove_unused(path: Path) -> None:
    """Remove a directory in which nothing but the files of `_fill_dir` is, without results. The caller holds its lock.

    The lock file goes last: without it, another process could begin to use the directory. What cannot be removed stays.
    """
    with contextlib.suppress(OSError):
        _remove_empty(path)


def _remove_empty(path: Path) -> None:
    entries = {entry.name for entry in path.iterdir()}
    if is_started(path) or not entries <= {"config.toml", *_FILES, *_FOLDERS, LOCK_NAME}:
        return
    if any((path / name).exists() and any((path / name).iterdir()) for name in _FOLDERS):
        return
    for name in sorted(entries & set(_FOLDERS)):
        (path / name).rmdir()
    for name in (*sorted(entries - {*_FOLDERS, LOCK_NAME}), LOCK_NAME):
        (path / name).unlink(missing_ok=True)
    path.rmdir()


def _start_afresh(path: Path, lock: int) -> int:
    """Move the directory aside, including its lock, and return the lock of the empty one in its place."""
    move_aside(path)
    fresh_lock = lock_dir(path)
    os.close(lock)
    return fresh_lock


def move_aside(path: Path) -> None:
    """Rename a folder to the first free `<path>.old-<n>`."""
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    path.rename(aside)


def lock_dir(path: Path, otherwise: str = "choose another name or seed") -> int:
    """Create the directory if needed and lock it; the descriptor holds the lock.

    `otherwise` tells the user what to do instead if another process uses the directory.
    """
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = open_lock(path / LOCK_NAME)
        except OSError as error:
            if isinstance(error, PermissionError) and not path.exists():
                raise ConfigError(f"cannot create {path}/: {error.strerror}") from None
            if is_refused(error):
                raise  # a disk error, which `guard_disk` reports
            raise ConfigError(f"{path}: cannot be used as a folder ({error.strerror})") from None
        if not try_lock(lock):
            owner = read_accounts(lock)
            os.close(lock)
            raise ConfigError(f"{path}: in use by process {owner}; wait for it or {otherwise}")
        # Another process may have moved (--fresh) or removed the directory between open and flock; this lock is then on
        # the wrong one.
        if is_same_file(lock, path / LOCK_NAME):
            with spare_words():  # the lock holds even if the process id cannot be written
                write_owner(lock)
            return lock
        os.close(lock)


@contextlib.contextmanager
def hold_dir(path: Path, otherwise: str) -> Iterator[None]:
    """Hold the directory's lock inside the context; `otherwise` as for `lock_dir`."""
    lock = lock_dir(path, otherwise)
    try:
        yield
    finally:
        os.close(lock)
