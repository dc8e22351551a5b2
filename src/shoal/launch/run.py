"""`shoal run`: a swarm from its settings to its report. The same command resumes one that was stopped.

    lock -> prepare -> start all parts -> supervise -> trainer and evaluator finished -> stop all -> report

The first Ctrl-C or SIGTERM stops all parts in order, the second kills them; neither loses anything that was answered.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.launch.cpu_usage import CpuMeter, add_costs
from shoal.launch.layout import SwarmPaths
from shoal.launch.parts import list_parts
from shoal.launch.prepare import PreparedSwarm, log_checks, prepare_swarm
from shoal.launch.process import Part, read_last_line
from shoal.launch.report import write_report
from shoal.launch.settings import LaunchConfig
from shoal.launch.supervisor import Supervisor
from shoal.launch.view import EVALS, METRICS, SnapshotReader, View, read_steps
from shoal.protocol.descriptor import open_descriptor
from shoal.train.rundir import is_started, lock_dir, move_aside
from shoal.util.aio import EXIT_INTERRUPTED, catch_signals, run_together
from shoal.util.logs import clean_text

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
STOPPING = "stopping all processes in order; press Ctrl-C again to kill them"
_LOOK_S = 0.5
_SPIN_COUNT = "5000"
"""see shoal.cli"""


def start_swarm(config: LaunchConfig, *, fresh: bool = False) -> tuple[int, str]:
    """Run a swarm to its last step, or until it is stopped: the exit code, and what its report says."""
    if config.swarm.is_spread:
        raise ConfigError(
            "swarm.hosts: this run is spread over several machines; `shoal prepare` prints what to type where"
        )
    layout = SwarmPaths.of(config)
    with hold_swarm(layout, fresh=fresh):
        prepared = prepare_swarm(config, layout)
        if is_finished(config, layout.root):
            logger.warning(describe_finished(config))
        else:
            log_checks(prepared)
            logger.info(f"run {config.run} in {layout.root}, coordinator at {prepared.url}")
            if code := asyncio.run(supervise_swarm(prepared, fresh=fresh)):
                return code, ""
            logger.info(f"run {config.run} is finished: {config.steps} of {config.steps} steps trained and evaluated")
        return 0, write_report(prepared)


@contextmanager
def hold_swarm(layout: SwarmPaths, *, fresh: bool = False) -> Iterator[None]:
    """While inside, nobody else prepares or runs this swarm; `fresh` moves what is there aside first."""
    lock = lock_dir(layout.launch)
    try:
        if fresh and (layout.settings.exists() or is_started(layout.root)):
            move_aside(layout.root)
            old, lock = lock, lock_dir(layout.launch)  # of the new folder, before that of the old one is given up
            os.close(old)
        yield
    finally:
        os.close(lock)


async def supervise_swarm(prepared: PreparedSwarm, *, fresh: bool = False) -> int:
    """Start all parts, show how they do, and stop them; 0 if the run came to its end, and else why not."""
    supervisor = open_supervisor(prepared, list_parts(prepared))
    meter = CpuMeter(supervisor)
    with closing(SnapshotReader(prepared, supervisor)) as reader:
        watching = meter.run(), View(reader).run(), _announce_key(prepared)
        code = await run_parts(supervisor, *watching, fresh=fresh)
    add_costs(prepared.layout.costs, meter.cpu_s)
    return code


async def _announce_key(prepared: PreparedSwarm) -> None:
    """Log how to join the run, as soon as the coordinator has made its key."""
    path = prepared.layout.coordinator / "descriptor.json"
    while not path.exists():
        await asyncio.sleep(_LOOK_S)
    key = open_descriptor(path.read_bytes().rstrip(b"\n")).coordinator
    logger.info(f"to join from this machine: shoal worker {prepared.url} --coordinator {key}")


def open_supervisor(prepared: PreparedSwarm, parts: Sequence[Part]) -> Supervisor:
    """A supervisor of parts of a swarm."""
    return Supervisor(parts, prepared.layout.logs, make_environment(prepared.config.swarm.threads))


async def run_parts(
    supervisor: Supervisor,
    *watching: Coroutine[Any, Any, None],
    until: Callable[[], bool] = lambda: True,
    fresh: bool = False,
) -> int:
    """Run parts to their end, with what watches them, or until a signal stops them: exit code.

    All that end by themselves have ended then, and `until` holds.
    """
    stop = asyncio.Event()
    with catch_signals(stop, exit_now=supervisor.kill_all, text=STOPPING):
        finished = await run_together(supervisor.run(until, stop), *watching)
    return 0 if finished else _report_end(supervisor, fresh=fresh)


def _report_end(supervisor: Supervisor, *, fresh: bool) -> int:
    """Why a swarm ended before its run did."""
    for name, state in supervisor.states.items():
        if state.failed:
            logger.error(f"{name} failed: {clean_text(read_last_line(supervisor.logs, name)).removeprefix('shoal: ')}")
            return EXIT_FAILED
    logger.info("stopped; the same command resumes it" + (", without --fresh" if fresh else ""))
    return EXIT_INTERRUPTED


def is_finished(config: LaunchConfig, root: Path) -> bool:
    """Whether the last version was trained and evaluated: there is nothing left but to report."""
    return all(config.steps in read_steps(root / name) for name in (METRICS, EVALS))


def describe_finished(config: LaunchConfig) -> str:
    """What to say when a finished run is started again."""
    done = f"run {config.run} is already finished ({config.steps} of {config.steps} steps)"
    return f"{done}; nothing was started. Start over with --fresh, or choose another name or seed"


def make_environment(threads: int) -> dict[str, str]:
    """What all parts are started with: many processes share this machine, so none takes all of it."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": _SPIN_COUNT}
