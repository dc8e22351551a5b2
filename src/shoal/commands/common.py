"""Shared by all commands: declaring a command, common flags, connecting to a coordinator, results and exit codes.

A command is declared once, as a `CliCommand` in the tuple `COMMANDS` of the module that runs it. Its help text is the
docstring of the function that runs it.

Invariants:
- importing a module of this package imports nothing heavy (torch, pydantic, sqlalchemy, cryptography, ...). Functions
  import what they need when they run, so that help and usage errors appear immediately;
- a refusal by the coordinator, or no response, is one line on stderr and exit code 1;
- text from a server is sanitised before it reaches the terminal.
"""

import argparse
import asyncio
import difflib
import inspect
import json
import logging
import os
import pkgutil
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.config.toml import VARIABLE_PREFIX
from shoal.errors import ConfigError, UnreachableError
from shoal.util.aio import EXIT_INTERRUPTED, run_until_cancelled
from shoal.util.logs import ENVIRONMENT, LEVELS, clean_text

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from shoal.config.run import RunConfig, Settings
    from shoal.identity.keys import Key
    from shoal.net.client import Endpoint, HttpDeadlines
    from shoal.net.retry import RetryPolicy
    from shoal.node.public_client import PublicClient
    from shoal.protocol.descriptor import Descriptor

logger = logging.getLogger(__name__)

EXIT_REFUSED = 1
Run = Callable[[argparse.Namespace], int] | Callable[[argparse.Namespace], Coroutine[None, None, "CommandResult"]]
Subparsers = Any
"""the type in argparse is private"""


class CommandParser(argparse.ArgumentParser):
    """A parser whose help can end with the groups of its settings, built only when help is requested.

    `--help GROUP` lists the settings of a group. An unknown command is answered with the closest match.
    """

    settings = ""

    def add_settings(self, settings: str) -> None:
        """Let the help describe the settings of a model, given as MODULE:MODEL."""
        self.settings = settings
        text = "show this help, or the settings of GROUP, and exit"
        self.add_argument("-h", "--help", action=_HelpAction, nargs="?", metavar="GROUP", help=text)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            raise argparse.ArgumentError(None, _explain_command(self.prog, action, str(value)))
        super()._check_value(action, value)

    def format_help(self) -> str:
        if not self.settings:
            return super().format_help()
        from shoal.config.help import describe_groups

        groups = describe_groups(pkgutil.resolve_name(self.settings), shutil.get_terminal_size((100, 24)).columns)
        hint = f"`{self.prog} --help GROUP` lists a group, `{self.prog} --help all` every setting:"
        return f"{super().format_help()}\nsettings: {hint}\n\n{groups}"

    def describe_group(self, name: str) -> str:
        """The settings of a group, or one setting."""
        from shoal.config.help import ALL_GROUPS, describe_settings, list_groups, select_settings

        model = pkgutil.resolve_name(self.settings)
        if not (settings := select_settings(model, name)):
            groups = [*list_groups(model), ALL_GROUPS]
            near = difflib.get_close_matches(name, groups, n=1)
            hint = f" did you mean {near[0]}?" if near else ""
            self.error(f"unknown group of settings {name[:40]!r};{hint} groups: {', '.join(groups)}")
        return describe_settings(settings, max(100, shutil.get_terminal_size((120, 24)).columns))


class _HelpAction(argparse.Action):
    """`--help`, or `--help GROUP` for the settings of a group."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        assert isinstance(parser, CommandParser)
        print(parser.describe_group(values) if values else parser.format_help(), end="")
        parser.exit()


_FOREIGN_COMMANDS = {
    "export": "a checkpoint already is a Hugging Face folder: runs/NAME/checkpoints/step-N/policy",
    "grpo": "did you mean `shoal train`?",
    "vllm-serve": "not needed; rollouts come from shoal's own engine",
}
"""commands of other programs, and what to do here"""


def _explain_command(prog: str, action: "argparse._SubParsersAction[CommandParser]", name: str) -> str:
    """Error text for an unknown command: suggest the group it belongs to, or the closest spelling."""
    if name in _FOREIGN_COMMANDS and prog == "shoal":
        return f"unknown command {name!r}; {_FOREIGN_COMMANDS[name]}"
    groups = [group for group, parser in action.choices.items() if name in _list_actions(parser)]
    near = [f"{group} {name}" for group in groups] or difflib.get_close_matches(name, action.choices, n=1)
    hint = f"; did you mean `{prog} {near[0]}`?" if near else ""
    return f"unknown command {name[:40]!r}{hint} (`{prog} --help` lists all)"


def _list_actions(parser: CommandParser) -> Iterable[str]:
    """Names of the actions of a command."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return groups[0].choices if groups else ()


Flag = Callable[[CommandParser], object]
"""adds a flag or an argument to a parser"""


def flag(*names: str, **options: Any) -> Flag:
    """A flag or positional argument; takes the arguments of argparse's `add_argument`."""
    return lambda parser: parser.add_argument(*names, **options)


@dataclass(frozen=True, slots=True)
class CliCommand:
    """One command. `run` takes the parsed flags and returns the exit code, or is a coroutine that returns a result.

    `actions` are its subcommands.
    """

    name: str
    run: Run | None = None
    flags: tuple[Flag, ...] = ()
    _: KW_ONLY
    text: str = ""
    """help text (default: the docstring of `run`)"""
    settings: str = ""
    """MODULE:MODEL, the settings that the help describes and that environment variables may set"""
    resumes: str = ""
    """appended to the message after an interruption"""
    actions: "tuple[CliCommand, ...]" = ()


def add_command(subparsers: Subparsers, command: CliCommand) -> None:
    """Add the parsers of a command and of its actions."""
    run, text = command.run, describe_command(command)
    options = {"help": text, "description": text, "allow_abbrev": False, "add_help": not command.settings}
    parser: CommandParser = subparsers.add_parser(command.name, **options)
    if command.settings:
        parser.add_settings(command.settings)
    for add_flag in command.flags:
        add_flag(parser)
    add_logging(parser, default=argparse.SUPPRESS)  # flags before the command apply unless repeated after it
    if inspect.iscoroutinefunction(run):
        run = partial(_run_query, run)
    parser.set_defaults(command=run, role=command.name, resumes=command.resumes, settings=command.settings)
    parser.set_defaults(options=tuple(parser._option_string_actions))
    if command.actions:
        actions = parser.add_subparsers(metavar="ACTION", title="actions", required=command.run is None)
        for action in command.actions:
            add_command(actions, action)


def describe_command(command: CliCommand) -> str:
    """One-line description of a command."""
    doc = " ".join((inspect.getdoc(command.run) or " ").split())
    return command.text or doc[:1].lower() + doc[1:].rstrip(".")


def _run_query(query: Callable[[argparse.Namespace], Coroutine[None, None, "CommandResult"]], args: Any) -> int:
    return run_query(query(args), as_json=args.json)


# --- flags and arguments


def add_logging(parser: CommandParser, default: Any = None) -> None:
    """Add the logging flags."""
    add = parser.add_argument_group("logging").add_argument
    text = f"minimum log level: {', '.join(LEVELS)} (default: {ENVIRONMENT}, or info)"
    add("--log-level", choices=LEVELS, metavar="LEVEL", default=default, help=text)
    add("-v", "--verbose", action="store_true", default=default, help="log everything: --log-level debug")
    add("-q", "--quiet", action="store_true", default=default, help="only log warnings: --log-level warning")
    add("--log-json", action="store_true", default=default, help="log one JSON object per line")


_DEVICES = re.compile(r"auto|cpu|(cuda|mps|xpu)(:[0-9]{1,2})?")
_DEVICE_HELP = "auto, cpu, cuda, cuda:1, mps or xpu (%(default)s: the accelerator that torch finds, else the CPU)"


def parse_device(text: str) -> str:
    """Check the name of a device; whether it is there is known only with torch."""
    if _DEVICES.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"invalid device {text[:40]!r}; use auto, cpu, cuda, cuda:1, mps or xpu")
    return text


def parse_where(text: str) -> str:
    """Check a coordinator's address or the path of a file."""
    if (scheme := _SCHEME.match(text)) and not is_address(text):
        raise argparse.ArgumentTypeError(f"unknown scheme {scheme[1][:40]}://; expected http:// or https://")
    return parse_ledger(text)


def parse_ledger(text: str) -> str:
    """Check an address, a database URL or a path; HOST:PORT alone is an address without its scheme."""
    if _HOST_PORT.fullmatch(text) and not Path(text).exists():
        raise argparse.ArgumentTypeError(f"an address needs its scheme; did you mean http://{text[:80]}?")
    return text


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.+-]*)://")
_HOST_PORT = re.compile(r"[A-Za-z0-9.-]+:[0-9]{1,5}(/\S*)?")
_WHERE = "coordinator's address, or path of the run's descriptor or folder"
WHERE = flag("where", type=parse_where, metavar="URL", help=_WHERE)
DEVICE = flag("--device", type=parse_device, default="auto", metavar="D", help=_DEVICE_HELP)
AUTHORITY = flag("--ca", type=Path, metavar="FILE", help="CA certificates to trust (default: the system's)")
JSON = flag("--json", action="store_true", help="print JSON")
QUERY = (WHERE, AUTHORITY, JSON)
"""flags of a command that queries a coordinator"""
SUBMISSION = flag("submission", metavar="SUBMISSION", help="id of the submission, e.g. s123")
DRY_RUN = flag("--dry-run", action="store_true", help="check and print the resolved settings, then exit")
NPROC = flag("--nproc", type=int, default=0, metavar="N", help="run as N ranks on this machine (default: one process)")
FRESH = flag("--fresh", action="store_true", help="move an existing run directory to DIR.old-N first")


def name_inputs(source: str = "CONFIG is a TOML file", example: str = "learner.lr=1e-4") -> Flag:
    """Positional arguments for settings: a file, and overrides."""
    text = f"{source} (default: the built-in settings); key=value overrides one setting, e.g. {example}"
    return flag("inputs", nargs="*", metavar="CONFIG key=value", help=text)


def split_inputs(inputs: list[str]) -> tuple[Path | None, list[str]]:
    """Split the inputs into the path of the configuration (the first input unless it is an override) and overrides."""
    if inputs and "=" not in inputs[0]:
        return Path(inputs[0]), inputs[1:]
    return None, inputs


def add_environment(inputs: list[str], settings: str) -> list[str]:
    """Inputs with the settings that environment variables hold, which the command line overrides."""
    if not any(name.startswith(VARIABLE_PREFIX) and name != ENVIRONMENT for name in os.environ):
        return inputs
    from shoal.config.run import find_unknown_variables, read_environment

    for name, meant in find_unknown_variables(pkgutil.resolve_name(settings)).items():
        print(f"shoal: {name} is not a setting and is ignored; did you mean {meant}?", file=sys.stderr)
    first = 1 if inputs and "=" not in inputs[0] else 0
    return [*inputs[:first], *read_environment(pkgutil.resolve_name(settings)), *inputs[first:]]


def log_loading(what: str) -> None:
    """Log that libraries are loaded, which takes seconds; of several ranks the first does."""
    if os.environ.get("RANK", "0") == "0":
        logger.info(f"{what}: loading libraries")


def load_inputs(inputs: list[str]) -> "RunConfig":
    """Load a run's settings from a command's arguments."""
    from shoal.config.run import load_config

    return load_config(*split_inputs(inputs))


def load_run(inputs: list[str], run_dir: Path | None = None) -> "tuple[Path | None, RunConfig]":
    """Return the named run directory, if any, and the settings: those of the directory, or those in the arguments."""
    from shoal.config.run import load_config

    path, overrides = split_inputs(inputs)
    path = path or run_dir
    if path is not None and path.is_dir():
        if not (path / "config.toml").exists():
            way = f"to evaluate a checkpoint or model: shoal eval RUN --models {path}"
            raise ConfigError(f"{path}: is not a run directory, it has no config.toml; {way}")
        run_dir, path = run_dir or path, path / "config.toml"
    elif path is not None and not path.exists():
        raise ConfigError(f"{path}: no such run directory or config file")
    return run_dir, load_config(path, overrides)


def print_settings(config: "Settings") -> int:
    """Print settings as TOML."""
    from shoal.config.run import dump_config

    print(dump_config(config), end="")
    return 0


def pick_flags(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Select flags by name, as keyword arguments."""
    return {name: getattr(args, name) for name in names}


def check_key(flag: str, text: str | None) -> str | None:
    """Check the public key that a flag holds, if it was given."""
    from shoal.identity.keys import check_public

    try:
        return None if text is None else check_public(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None


def check_least(flag: str, value: int, least: int) -> None:
    """Raise ConfigError if a number is too small."""
    if value < least:
        raise ConfigError(f"{flag}: must be {least} or more")


def parse_address(text: str) -> tuple[str, int]:
    """Parse the HOST:PORT of `--listen`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen: invalid address {text!r}, expected HOST:PORT")
    return host.strip("[]"), int(port)


def check_submission(text: str) -> str:
    """Check the format of a submission id."""
    if not (text[:1] == "s" and text[1:].isascii() and text[1:].isdecimal() and len(text) < 20):
        raise ConfigError(f"invalid submission id {text[:40]!r}, expected s followed by a number")
    return text


def load_key(path: Path) -> "Key":
    """Load a key from a file that the user named."""
    from shoal.identity.keys import Key

    return Key.load(path)


def read_file(path: Path, max_bytes: int = 1 << 22) -> bytes:
    """Read a file that the user named."""
    try:
        with path.open("rb") as file:
            return file.read(max_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


# --- how a command ends


class CommandResult(NamedTuple):
    """Exit code, text to print, and the same result as JSON."""

    code: int
    text: str
    data: Any = None


def print_result(result: CommandResult, *, as_json: bool = False) -> int:
    """Print a result and return its exit code."""
    print(json.dumps(result.data) if as_json else clean_text(result.text))
    return result.code


def run_query(work: Coroutine[None, None, CommandResult], *, as_json: bool = False) -> int:
    """Run a command that queries a coordinator, and print its result."""
    try:
        return print_result(asyncio.run(work), as_json=as_json)
    except query_errors() as error:
        print(f"shoal: {clean_text(explain_error(error))}", file=sys.stderr)
        return EXIT_REFUSED


def query_errors() -> tuple[type[Exception], ...]:
    """The exceptions that a query to a coordinator can raise."""
    from shoal.ledger.head import ForkError
    from shoal.net.retry import RefusedError
    from shoal.node.receipts import InvalidDocumentError

    return (RefusedError, UnreachableError, InvalidDocumentError, ForkError)


def explain_error(error: Exception) -> str:
    """Describe an error on one line."""
    from shoal.ledger.head import ForkError

    text = " ".join(str(error).split())
    if isinstance(error, UnreachableError):
        return text if error.is_busy else f"the coordinator does not answer: {text}"
    if not isinstance(error, ForkError):
        return text
    return f"fork: {text}" if error.fork.convicts else f"fork: {text}; this node stops; restart it to check again"


@dataclass(slots=True)
class StopCode:
    """Exit code when a signal stops a command: 0 for servers, `EXIT_INTERRUPTED` if a result is still missing."""

    code: int = EXIT_INTERRUPTED


def run_until_stopped(work: Coroutine[None, None, int], stop: StopCode | None = None) -> int:
    """Run until done. SIGINT and SIGTERM cancel it and shut it down in order: transfers finish, files are closed.

    `stop` holds the exit code in that case and may change while it runs (default: 0, the normal end of a server).
    """
    try:
        return run_until_cancelled(work)
    except asyncio.CancelledError:
        print("shoal: stopped", file=sys.stderr)
        return 0 if stop is None else stop.code


# --- connecting to a coordinator


def quick_retries() -> "RetryPolicy":
    """Retry policy for interactive use; nodes retry for longer."""
    from shoal.net.retry import RetryPolicy

    return RetryPolicy(tries=3, first_s=0.3, longest_s=5.0)


def find_endpoint(where: str, authority: Path | None) -> "Endpoint":
    """Address of a coordinator: as given, or the first one in a descriptor file."""
    from shoal.net.client import parse_endpoint

    url = where if is_address(where) else read_descriptor(Path(where))[0].urls[0]
    return parse_endpoint(url, authority)


def is_address(text: str) -> bool:
    """Whether the text is an HTTP or HTTPS address."""
    return text.startswith(("http://", "https://"))


@asynccontextmanager
async def open_client(
    where: str, authority: Path | None, *, deadlines: "HttpDeadlines | None" = None
) -> "AsyncIterator[PublicClient]":
    """Open a client for requests that need no key."""
    from shoal.net.client import HttpClient
    from shoal.net.retry import RetryingClient
    from shoal.node.public_client import PublicClient

    endpoint = find_endpoint(where, authority)
    link, asker = HttpClient(endpoint, deadlines), RetryingClient(quick_retries())
    with closing(PublicClient(endpoint, link=link, asker=asker)) as client:
        yield client


@contextmanager
def open_folder(where: str) -> "Iterator[Connection]":
    """Read the ledger in the folder of a run or a coordinator, whether that runs or not."""
    from shoal.audit.database import find_database, open_reader, read_ledger

    with open_reader(find_database(where)) as engine, read_ledger(engine) as connection:
        yield connection


async def fetch_descriptor(client: "PublicClient") -> "tuple[Descriptor, bytes]":
    """Fetch the descriptor from a coordinator; also returns its bytes. Later answers must be signed by its key."""
    from shoal.identity.documents import DocumentError
    from shoal.node.known_run import fetch_run

    try:
        return await fetch_run(client)
    except DocumentError as error:
        raise UnreachableError(f"the server sent an invalid run descriptor ({error})") from None


def read_descriptor(path: Path) -> "tuple[Descriptor, bytes]":
    """Read a descriptor from a file; also returns its bytes."""
    from shoal.identity.documents import DocumentError
    from shoal.protocol.descriptor import MAX_DESCRIPTOR_BYTES, open_descriptor

    if not path.exists():
        raise ConfigError(f"{path}: cannot be read (no such file); an address begins with http:// or https://")
    if path.is_dir():
        found = [place / "descriptor.json" for place in (path, path / "coordinator")]
        if not any(file.exists() for file in found):
            raise ConfigError(f"{path}: no descriptor.json in it; give the coordinator's address, or a run's folder")
        path = next(file for file in found if file.exists())
    data = read_file(path, MAX_DESCRIPTOR_BYTES + 1).rstrip(b"\n")
    try:
        descriptor = open_descriptor(data)
    except DocumentError as error:
        raise ConfigError(f"{path}: invalid run descriptor ({error})") from None
    if not descriptor.urls:
        raise ConfigError(f"{path}: the descriptor lists no coordinator address")
    return descriptor, data
