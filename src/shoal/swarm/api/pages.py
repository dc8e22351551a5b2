"""Answers of the routes for whoever checks a run. Clients read them too, so no server is imported here."""

from typing import Annotated, Any

from pydantic import Field

from shoal.swarm.messages import Message

MAX_PAGE_EVENTS = 512


class ParamsAnswer(Message):
    """The run's parameters as they are now."""

    params: dict[str, Any]


class PageAnswer(Message):
    """Consecutive events of the ledger, each as a bundle without its path (`Bundle.to_bytes` as text)."""

    events: Annotated[tuple[str, ...], Field(max_length=MAX_PAGE_EVENTS)]
