"""`shoal coordinator`: serve a run, from its first start to its last step.

What a person needs goes to stdout when it starts; the log, one JSON object a line, goes to stderr.
"""

import argparse
import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from shoal.commands.serving import parse_address
from shoal.commands.swarm_call import run_until_stopped
from shoal.commands.swarm_settings import load_service
from shoal.disk import guard_disk, has_room, spare_words
from shoal.errors import ConfigError, DiskError
from shoal.swarm.closed import await_room
from shoal.swarm.hosts import is_loopback
from shoal.swarm.service import Service, ServiceConfig, list_differences, open_service
from shoal.swarm.stakes import describe_dial, list_warnings
from shoal.swarm.writer import WriterStoppedError

Say = Callable[[str], None]


def run_coordinator(args: argparse.Namespace) -> int:
    path, overrides = _split_inputs(args.inputs)
    flags: dict[str, Any] = {
        "run": args.run,
        "operator": args.operator,
        "urls": args.url,
        "database": args.database,
        "blob_store": args.blobs,
        "tls_certificate": None if args.tls_cert is None else str(args.tls_cert),
        "tls_key": None if args.tls_key is None else str(args.tls_key),
    }
    if args.listen is not None:
        flags["host"], flags["port"] = parse_address(args.listen)
    config = load_service(path, overrides, flags)
    _check_bind(config, is_public=args.public)
    if args.dry_run:
        print(json.dumps(config.model_dump(mode="json"), indent=2))
        return 0
    with guard_disk(args.data):
        return run_until_stopped(lambda: serve_run(config, args.data, show=partial(print, flush=True)))


async def serve_run(config: ServiceConfig, data: Path, *, log: Say | None = None, show: Say | None = None) -> int:
    """Serve a run until the task is cancelled. `log` gets lines of JSON, `show` what a person wants to see once.

    A full disk closes the coordinator until there is room; it goes on from what is on disk, as after a kill.
    """
    tell = partial(_tell, log or _write_log)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: _tell_bug(tell, context))
    while True:
        try:
            return await _serve_once(config, data, tell, show)
        except (ConfigError, DiskError, OSError) as error:
            if not data.is_dir() or await asyncio.to_thread(has_room, data):
                raise
            tell("disk full", text=str(error), folder=str(data))
        await await_room(config, data)
        tell("room again", folder=str(data))


async def _serve_once(config: ServiceConfig, data: Path, tell: Callable[..., None], show: Say | None) -> int:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(open_service(config, data))
        stack.callback(tell, "stopping")
        tell("started", url=service.url, run=config.run, coordinator=service.coordinator.public)
        _tell_concerns(tell, config, service)
        if show is not None:
            with spare_words():
                show(describe_service(config, data, service))
        closing = stack.pop_all()  # what began in order ends in order, and is told to have ended
    try:
        async with closing:
            await service.run(tell)
    except WriterStoppedError as error:
        raise DiskError(f"the ledger stopped: {error}; start the coordinator again") from error
    finally:
        tell("stopped")
    return 0


def describe_service(config: ServiceConfig, data: Path, service: Service) -> str:
    """Where everything is, and how to join."""
    descriptor, key = service.descriptor, data / "operator.key"
    size = service.coordinator.ledger.size
    kept = f" (its key is {key}; move it to where it is safe)" if key.exists() else ""
    joining = [f"shoal join {service.url} --coordinator {descriptor.coordinator} --owner OWNER.key"]
    if descriptor.tasks:  # there is something to work on
        joining.insert(0, f"shoal worker {service.url} --coordinator {descriptor.coordinator}")
    lines = [
        f"run {config.run}: {'begun' if size <= 2 else 'resumed'}, {size} events",
        f"  serving      {', '.join(descriptor.urls)}",
        f"  ledger       {_hide_password(config.database) or data / 'ledger.db'}",
        f"  descriptor   {data / 'descriptor.json'}",
        f"  coordinator  {descriptor.coordinator}",
        f"  operator     {descriptor.operator}{kept}",
        *(f"  to join      {command}" for command in joining),
        *(f"  checks       {line}" for line in describe_dial(service.coordinator.params)),
    ]
    return "\n".join(lines)


def _tell_concerns(tell: Callable[..., None], config: ServiceConfig, service: Service) -> None:
    """What an operator may not have meant."""
    if names := list_differences(config, service.coordinator.params):
        tell("params kept", names=names, text="the run keeps its own parameters; `shoal admin params` changes them")
    if not is_loopback(config.host) and not config.tls_certificate:
        tell("no tls", text="served to other machines without TLS: put a proxy before it, or give a certificate")
    for text in list_warnings(service.coordinator.params, join_work=config.join_work):
        tell("cheating pays", text=text)
    if config.blob_store and not service.descriptor.stores:
        tell("store hidden", text="nodes use a bucket by https alone: here all files go through the coordinator")


def _check_bind(config: ServiceConfig, *, is_public: bool) -> None:
    if not is_public and not is_loopback(config.host):
        raise ConfigError(f"{config.host}: reached from other machines; add --public if that is meant")
    if config.http.behind_proxy and not is_loopback(config.host):
        raise ConfigError("http.behind_proxy: callers could name any address as theirs; listen on 127.0.0.1 only")


def _split_inputs(inputs: list[str]) -> tuple[Path | None, list[str]]:
    if inputs and "=" not in inputs[0]:
        return Path(inputs[0]), inputs[1:]
    return None, inputs


def _hide_password(url: str) -> str:
    from sqlalchemy.engine import make_url

    return make_url(url).render_as_string(hide_password=True) if "://" in url else url


def _tell(log: Say, event: str, **fields: object) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    log(json.dumps({"time": now, "event": event, **fields}))


def _tell_bug(tell: Callable[..., None], context: dict[str, Any]) -> None:
    error = context.get("exception")
    trace = "".join(traceback.format_exception(error)) if error is not None else ""
    tell("bug", text=str(context.get("message", "")), trace=trace[-4000:])


def _write_log(line: str) -> None:
    with spare_words():
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
