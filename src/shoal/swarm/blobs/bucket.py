"""A bucket by its URL, `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`, tried before it is used.

Credentials come from where the AWS tools take them: the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_SESSION_TOKEN), a web identity, or the machine's role.
"""

import os
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from shoal.errors import ConfigError

FAULTS = (BaseError, OSError)
"""what the library raises: its own errors, and those of the standard library where they fit"""
_CONNECT_S, _REQUEST_S, _RETRY_S = 5, 120, 20
_OPTIONS = {"endpoint", "region"}


def open_bucket(url: str) -> S3Store:
    """The bucket that a URL names; `ConfigError` if it cannot be written to, read from and removed from now."""
    store = _find_bucket(url)
    _try_bucket(url, store)
    return store


def _find_bucket(url: str) -> S3Store:
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.scheme != "s3" or not parts.hostname or parts.fragment or options.keys() - _OPTIONS:
        raise ConfigError(f"{_hide_user(url)!r}: expected s3://BUCKET/PREFIX?endpoint=URL&region=NAME")
    if parts.username is not None or parts.port is not None:
        raise ConfigError("credentials for S3 come from the environment (AWS_ACCESS_KEY_ID ...), not from the URL")
    endpoint, region = options.get("endpoint"), options.get("region")
    more: dict[str, Any] = {} if region is None else {"region": region}
    if endpoint is not None:
        more |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
        more.setdefault("region", "us-east-1")
    try:
        return S3Store(
            parts.hostname,
            prefix=parts.path.strip("/") or None,
            client_options={
                "allow_http": endpoint is not None and endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=_CONNECT_S),
                "timeout": timedelta(seconds=_REQUEST_S),
            },
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=_RETRY_S)},
            **more,
        )
    except (*FAULTS, ValueError) as error:
        raise ConfigError(f"{url}: no bucket can be reached so ({_phrase(error)})") from None


def _try_bucket(url: str, store: S3Store) -> None:
    """Write, read and remove something, so that what is wrong with the bucket is said at the start."""
    key, data = f"checking/{os.urandom(16).hex()}", b"shoal"
    try:
        obstore.put(store, key, data)
        found = bytes(obstore.get(store, key).bytes())
        obstore.delete(store, key)
    except FileNotFoundError:
        raise ConfigError(f"{url}: there is no such bucket; make it first") from None
    except (PermissionError, PermissionDeniedError, UnauthenticatedError) as error:
        text = "credentials are missing or wrong, or do not allow to write, read and remove there"
        raise ConfigError(f"{url}: {text} ({_phrase(error)})") from None
    except FAULTS as error:
        raise ConfigError(
            f"{url}: the bucket cannot be used; is it there, and are there credentials? ({_phrase(error)})"
        ) from None
    if found != data:
        raise ConfigError(f"{url}: the bucket gives back other bytes than it was given")


def _phrase(error: BaseException) -> str:
    """The first words of an error of the library, which may go on for pages, with the server's XML in them."""
    first = (str(error).splitlines() or [""])[0].partition("<")[0].strip(" :")
    return first[:300] or type(error).__name__


def _hide_user(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"s3://...@{tail}" if at and head else url
