"""A site with a real reducer: stopped in the middle of a run with overlap, it resumes from its disk."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.diloco.test_train import SMALL

from shoal.config.run import build_config
from shoal.diloco.checkpoint import was_settled
from shoal.diloco.http.service import open_reducer, settle_plan
from shoal.diloco.http.settings import ReducerConfig
from shoal.diloco.outer import DilocoPlan
from shoal.diloco.settings import DilocoConfig
from shoal.diloco.site import ReducerAccess, Site, make_start, open_site_key, run_site
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.learner.checkpoint import find_newest
from shoal.net.client import parse_endpoint


class _StopError(Exception):
    pass


@contextmanager
def serve_run(config: DilocoConfig, folder: Path, key: Key | None = None) -> Iterator[tuple[DilocoPlan, str, str]]:
    """A reducer in a thread: plan, address and key."""
    plan, initial = make_start(config)
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), []

    async def serve() -> None:
        peers = ((key or open_site_key(config)).public,)
        async with open_reducer(ReducerConfig(port=0, peers=peers), folder, plan, initial=initial) as service:
            found.append((service.url, service.public))
            ready.set()
            await service.run()

    task = loop.create_task(serve())

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(asyncio.wait([task]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert ready.wait(20), "the reducer does not start"
        yield (plan, *found[0])
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_site_that_was_stopped_goes_on_with_its_own_optimizer(tmp_path: Path, delay: int, log) -> None:
    book = tmp_path / "book.txt"
    book.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    config = build_config(DilocoConfig, {}, [f"data.source={book}", f"out={tmp_path / 'runs'}", *SMALL, "steps=24"])

    def stop_early(text: str) -> None:
        if text.startswith("step 12"):
            raise _StopError

    with serve_run(config, tmp_path / "reducer") as (plan, url, reducer):
        way, log.on_message = ReducerAccess([parse_endpoint(url)], reducer, delay), stop_early
        with pytest.raises(_StopError):
            run_site(config, plan, way)
        checkpoint = find_newest(tmp_path / "runs" / "diloco-site0" / "checkpoints")
        assert checkpoint is not None and checkpoint.name == "step-000006", "of the round before"
        (name,) = [path.name for path in (checkpoint / "peers").iterdir()]
        assert was_settled(checkpoint, name) == (delay == 0), "steps of the overlap are in no round"
        log.on_message = lambda text: None
        policy = run_site(config, plan, way)
    assert "resuming at step 12 with the optimizer of step 6" in log.messages
    assert (policy / "model.safetensors").exists()


def test_a_site_reads_in_the_order_of_the_run_whatever_its_own_seed(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    words = [f"data.source={book}", f"out={tmp_path / 'runs'}", *SMALL, "steps=6"]
    config, folder = build_config(DilocoConfig, {}, [*words, "seed=7"]), tmp_path / "site"
    folder.mkdir()
    with serve_run(config, tmp_path / "reducer", Key.open(folder / "site.key")) as (plan, url, reducer):
        assert settle_plan(plan).seed == 7, "the card has it"
        way = ReducerAccess([parse_endpoint(url)], reducer)
        site = Site(build_config(DilocoConfig, {}, [*words, "seed=8"]), plan, way, folder)
        site.peer.close()
    assert site.reader.seed == plan.seed == 7
    with pytest.raises(ConfigError, match="must not exceed"):
        settle_plan(replace(plan, seed=1 << 60))
