"""Running a coordinator for `shoal coordinator`: its settings, its start, its log, and waiting while the disk is full.

Settings come from a TOML file, overridden by `key=value` arguments and flags; the models validate them, and their
errors become readable messages here.

While the disk is full, every request is answered with that error until there is space. Callers retry, as for any 503
answer: roles wait, and `shoal status` shows the reason.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.config.help import explain_errors
from shoal.config.run import Settings, lay_override
from shoal.config.toml import read_toml
from shoal.coordinator.economics import describe_check_rate, list_warnings
from shoal.coordinator.service import CoordinatorService, ServiceConfig, list_differences, open_service
from shoal.errors import ConfigError, DiskError, UnavailableError
from shoal.identity.keys import check_public
from shoal.identity.routes import build_error
from shoal.ledger.ledger import WriterStoppedError
from shoal.net.api_error import ApiError
from shoal.net.server import HttpServer, Receive, Scope, Send
from shoal.net.sockets import is_loopback, load_server_tls
from shoal.protocol.check_rate import ValidationConfig
from shoal.protocol.params import RunParams, set_check_rate
from shoal.protocol.power import Dial, read_power
from shoal.util.clock import read_clock
from shoal.util.disk import has_room, spare_words
from shoal.util.units import check_run

LOOK_S = 1.0
RETRY_S = 2
TEXT = "the coordinator's disk is full; it resumes automatically when there is free space"


async def await_room(config: ServiceConfig, data: Path) -> None:
    """Wait until the disk of a coordinator's folder has free space; meanwhile answer all requests with the reason."""
    tls = load_server_tls(Path(config.tls_certificate), Path(config.tls_key)) if config.tls_certificate else None
    server = HttpServer(_refuse_all, limits=config.http, tls=tls)
    await server.start(config.host, config.port)
    try:
        while not await asyncio.to_thread(has_room, data):
            await asyncio.sleep(LOOK_S)
    finally:
        await server.close()


async def _refuse_all(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI app that refuses every request."""
    refusal = ApiError(503, "disk", TEXT, retry_after_s=RETRY_S)
    await build_error(refusal, read_clock()).send_to(send)


logger = logging.getLogger(__name__)
_KEYS = ("params.trainers", "params.validators", "trainers", "validators")
_LISTS = ("urls", *_KEYS)


class CoordinatorSettings(ServiceConfig):
    """All keys of a coordinator's settings file: those of the service, and how much is checked."""

    validation: ValidationConfig = ValidationConfig()


class _ValidationTable(Settings):
    validation: ValidationConfig


def load_service(path: Path | None, overrides: Sequence[str], flags: dict[str, Any]) -> ServiceConfig:
    """Load settings from a file (None: the defaults), then apply overrides, then flags; a flag of None is ignored."""
    data = {} if path is None else read_toml(path)
    for override in overrides:
        lay_override(ServiceConfig, data, override, example="params.steps=10")
    data |= {name: value for name, value in flags.items() if value is not None}
    _apply_guarantee(data)
    if "run" not in data:
        raise ConfigError("run: missing name of the run; pass --run NAME, or set `run` in the settings")
    return _validate(ServiceConfig, data)


def parse_changes(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse changes of parameters, each `name=value`."""
    changes: dict[str, Any] = {}
    for override in overrides:
        lay_override(RunParams, changes, override, example="price=2")
    return changes


def build_params(data: dict[str, Any]) -> RunParams:
    """Build parameters from plain values; ConfigError if they are invalid."""
    return _validate(RunParams, data)


def _apply_guarantee(data: dict[str, Any]) -> None:
    """Copy the table `[validation]` into the parameters, where the ledger stores it."""
    if "validation" not in data:
        return
    validation = _validate(_ValidationTable, {"validation": data.pop("validation")}).validation
    params = data.setdefault("params", {})
    if isinstance(params, dict):  # otherwise validation rejects it later
        dial = _weigh_power(validation, params, data.get("calibration"))
        if said := sorted(dial.keys() & params.keys()):
            raise ConfigError(f"params.{said[0]}: conflicts with the table [validation]; keep one of the two")
        params.update(dial)


def _weigh_power(validation: ValidationConfig, params: dict[str, Any], calibration: object) -> dict[str, int]:
    """The parameters that follow from a guarantee and from the power that the calibration measured, if there is one."""
    if not isinstance(calibration, str) or not calibration:
        return set_check_rate(validation)
    try:
        powers = read_power(Path(calibration).read_bytes())
    except OSError as error:
        raise ConfigError(f"{calibration}: cannot be read ({error.strerror})") from None
    sizes = build_params(params)
    rollouts = (sizes.groups_per_lease or 1) * sizes.group_size
    return Dial(validation, powers, rollouts=rollouts, validators=len(sizes.validators)).set_params()


def _validate(model: type[Any], data: dict[str, Any]) -> Any:
    """Validate as JSON, where a list may be a tuple and everything else is as strict as in Python."""
    _check_lists(data)
    _check_names(data)
    try:
        return model.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise ConfigError(explain_errors(model, error)) from None


def _check_lists(data: dict[str, Any]) -> None:
    params = data.get("params")
    values = data | ({f"params.{name}": value for name, value in params.items()} if isinstance(params, dict) else {})
    for name in _LISTS:
        value = values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f'{name}: must be a list of strings, ["...", "..."]')
        for item in value if name in _KEYS else ():
            check_public(item)
    for url in values.get("urls", []):
        if not url.startswith(("http://", "https://")) or url.count("/") != 2 or not url.isprintable() or " " in url:
            raise ConfigError(f"urls: {url[:80]!r} is not an address; use https://HOST or http://HOST:PORT")
    if len(values.get("urls", [])) > 8:
        raise ConfigError("urls: at most 8 addresses")


def _check_names(data: dict[str, Any]) -> None:
    run, operator = data.get("run"), data.get("operator")
    if isinstance(run, str):
        try:
            check_run(run)
        except ValueError as error:
            raise ConfigError(f"run: {error}") from None
    if isinstance(operator, str) and operator:
        check_public(operator)


async def serve_run(config: ServiceConfig, data: Path, *, show: Callable[[str], None] | None = None) -> int:
    """Serve a run until the task is cancelled. `show` gets a summary to print once.

    A full disk closes the coordinator until there is free space; it then resumes from what is on disk, as after a kill.
    """
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: logger.error("bug: %s", context.get("message", ""), exc_info=context.get("exception"))
    )
    while True:
        try:
            return await _serve_once(config, data, show)
        except (ConfigError, DiskError, UnavailableError, OSError) as error:
            if not data.is_dir() or await asyncio.to_thread(has_room, data):
                raise
            logger.error("disk full: %s", error, extra={"fields": {"folder": str(data)}})
        await await_room(config, data)
        logger.info("the disk has free space again", extra={"fields": {"folder": str(data)}})


async def _serve_once(config: ServiceConfig, data: Path, show: Callable[[str], None] | None) -> int:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(open_service(config, data))
        stack.callback(logger.info, "stopping")
        fields = {"url": service.url, "run": config.run, "coordinator": service.coordinator.public}
        logger.info("started", extra={"fields": fields})
        _log_concerns(config, service)
        if show is not None:
            with spare_words():
                show(describe_service(config, data, service))
        closing = stack.pop_all()  # stop in reverse order of starting, with log messages
    try:
        async with closing:
            await service.run()
    except WriterStoppedError as error:
        raise DiskError(f"the ledger stopped: {error}; restart the coordinator") from error
    finally:
        logger.info("stopped")
    return 0


def describe_service(config: ServiceConfig, data: Path, service: CoordinatorService) -> str:
    """Where everything is, and how to join."""
    descriptor, key = service.descriptor, data / "operator.key"
    size, (host, port) = service.coordinator.ledger.size, service.server.address
    state = "begun" if size <= 2 else "finished" if service.coordinator.cache.finished else "resumed"
    kept = f" (its key is {key}; move it to a safe place)" if key.exists() else ""
    trust = f" --ca {config.ca}" if config.ca else ""
    where = f"{service.url} --coordinator {descriptor.coordinator}"
    joining = [f"shoal node join {where} --owner OWNER.key{trust}"]
    if descriptor.tasks:  # the run has tasks
        joining.insert(0, f"shoal worker {where}{trust}")
    if service.coordinator.cache.finished:
        joining = []
    lines = [
        f"run {config.run}: {state}, {size} events",
        f"  listening    {host}:{port} ({'https' if config.tls_certificate else 'http'})",
        f"  address      {', '.join(descriptor.urls)}",
        f"  ledger       {hide_password(config.database) or data / 'ledger.db'}",
        f"  descriptor   {data / 'descriptor.json'}",
        f"  coordinator  {descriptor.coordinator}",
        f"  operator     {descriptor.operator}{kept}",
        *(f"  to join      {command}" for command in joining),
        *(f"  checks       {line}" for line in describe_check_rate(service.coordinator.params)),
    ]
    return "\n".join(lines)


def _log_concerns(config: ServiceConfig, service: CoordinatorService) -> None:
    """Warn about settings that the operator may not have intended."""
    for text in list_differences(config, service.coordinator.params):
        logger.warning(f"{text} (`shoal admin params` changes it)")
    has_tls = config.tls_certificate or config.http.behind_proxy
    if not has_tls and any(url.startswith("https:") for url in config.urls):
        text = (
            "serving plain HTTP for an https:// address: give --tls-cert and --tls-key, or set http.behind_proxy=true"
        )
        logger.warning(text)
    elif not is_loopback(config.host) and not config.tls_certificate:
        logger.warning("serving other machines without TLS: use a reverse proxy, or configure a certificate")
    for text in list_warnings(service.coordinator.params, join_work=config.join_work):
        logger.warning(text)
    if config.blob_store and not service.descriptor.stores:
        logger.warning("nodes access a bucket only over https: all files will go through the coordinator")


def hide_password(url: str) -> str:
    """The URL of a database for people to read."""
    from sqlalchemy.engine import make_url

    return make_url(url).render_as_string(hide_password=True) if "://" in url else url
