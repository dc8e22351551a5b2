"""Short answers: refusals, JSON, and the kinds of content that a server names."""

import json
from collections.abc import Mapping

from shoal.shardcast.connection import Connection

JSON, LINES, TEXT, BYTES = "application/json", "application/x-ndjson", "text/plain", "application/octet-stream"


async def send_refusal(conn: Connection, status: int, reason: str, *headers: tuple[str, str]) -> None:
    """A refusal as one line of text."""
    await conn.send_answer(status, f"{reason}\n".encode(), TEXT, *headers)


async def send_json(conn: Connection, fields: Mapping[str, object]) -> None:
    """An object on one line."""
    body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    await conn.send_answer(200, body + b"\n", JSON)
