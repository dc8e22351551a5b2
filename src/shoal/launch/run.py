"""`shoal run`: a swarm from its settings to its report. The same command goes on with one that was stopped.

    lock -> prepare -> start all parts -> look after them -> trainer and evaluator finished -> stop all -> report

The first Ctrl-C or SIGTERM stops all parts in order, the second kills them; both lose nothing that was answered.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.console import clean_text
from shoal.errors import ConfigError
from shoal.launch.glance import EVALS, METRICS, Watch, read_steps
from shoal.launch.layout import Layout
from shoal.launch.meter import Meter, add_costs
from shoal.launch.part import read_last_line
from shoal.launch.prepare import Note, Prepared, prepare_swarm, tell_dial
from shoal.launch.report import write_report
from shoal.launch.roster import list_parts
from shoal.launch.settings import LaunchConfig
from shoal.launch.supervise import Supervisor
from shoal.launch.view import View
from shoal.node.tasks import run_together
from shoal.rundir import is_started, lock_dir

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
_SPIN_COUNT = "5000"
"""see shoal.cli"""


def start_swarm(config: LaunchConfig, note: Note, *, fresh: bool = False) -> int:
    """Run a swarm to its last step and write its report, or until it is stopped."""
    if config.swarm.is_spread:
        raise ConfigError("swarm.hosts: its parts are on several machines; `shoal prepare` prints what to type where")
    layout = Layout.of(config)
    with hold_swarm(layout, fresh=fresh):
        prepared = prepare_swarm(config, layout, note)
        if not is_finished(config, layout.root):
            tell_dial(prepared, note)
            note(f"run {config.run} in {layout.root}, coordinator at {prepared.url}")
            if code := asyncio.run(supervise_swarm(prepared, note)):
                return code
        note(write_report(prepared))
    return 0


@contextmanager
def hold_swarm(layout: Layout, *, fresh: bool = False) -> Iterator[None]:
    """While inside, nobody else prepares or runs this swarm; `fresh` moves what is there aside first."""
    lock = lock_dir(layout.launch)
    try:
        if fresh and (layout.settings.exists() or is_started(layout.root)):
            layout.root.rename(_find_free(layout.root))
            old, lock = lock, lock_dir(layout.launch)  # of the new folder, before that of the old one is given up
            os.close(old)
        yield
    finally:
        os.close(lock)


async def supervise_swarm(prepared: Prepared, note: Note) -> int:
    """Start all parts, show how they do, and stop them; 0 if the run came to its end, and else why not."""
    stop, logs = asyncio.Event(), prepared.layout.logs
    supervisor = Supervisor(list_parts(prepared), logs, make_environment(prepared.config.swarm.threads))
    watch, meter = Watch(prepared, supervisor), Meter(supervisor)
    view = View(watch)
    supervisor.note = view.note
    try:
        with catch_signals(stop, supervisor.kill_all, view.note):
            finished = await run_together(supervisor.run(lambda: True, stop), view.run(), meter.run())
    finally:
        watch.close()
    add_costs(prepared.layout.costs, meter.cpu_s)
    return 0 if finished else _tell_end(supervisor, logs, note)


def _tell_end(supervisor: Supervisor, logs: Path, note: Note) -> int:
    """Why a swarm ended before its run did."""
    for name, state in supervisor.states.items():
        if state.failed:
            note(f"{name} cannot go on: {clean_text(read_last_line(logs, name)).removeprefix('shoal: ')}")
            return EXIT_FAILED
    note("stopped; the same command goes on from here")
    return EXIT_INTERRUPTED


def is_finished(config: LaunchConfig, root: Path) -> bool:
    """Whether the last version was trained and evaluated: there is nothing left but to report."""
    written = [read_steps(root / name) for name in (METRICS, EVALS)]
    return all(config.steps in steps for steps in written)


def make_environment(threads: int) -> dict[str, str]:
    """What all parts are started with: many processes share this machine, so none takes all of it."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": _SPIN_COUNT}


@contextmanager
def catch_signals(stop: asyncio.Event, kill: Callable[[], None], note: Note) -> Iterator[None]:
    """While inside, the first signal stops all parts in order, and the second kills them."""
    loop = asyncio.get_running_loop()

    def take_signal() -> None:
        if stop.is_set():
            kill()
            return
        note("stopping all parts in order; once more to kill them")
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, take_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _find_free(root: Path) -> Path:
    number = 1
    while (path := root.with_name(f"{root.name}.old-{number}")).exists():
        number += 1
    return path
