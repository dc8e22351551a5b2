"""A refusal is final only if it comes from the coordinator."""

import asyncio

import pytest

from shoal.errors import UnreachableError
from shoal.identity.keys import Key
from shoal.identity.signer import RequestSigner
from shoal.net.client import HttpResponse
from shoal.net.retry import RefusedError, RetryingClient, RetryPolicy

PAGE = b"<html>Welcome to our network</html>"
WORD = b'{"code":"banned","text":"this node is banned"}'


def ask(*answers: HttpResponse, signed: bool = True) -> HttpResponse:
    async def sleep(seconds: float) -> None:
        pass

    async def attempt() -> HttpResponse:
        return left.pop(0)

    left = list(answers)
    signer = RequestSigner(Key.generate(), "demo", Key.generate().public) if signed else None
    return asyncio.run(RetryingClient(RetryPolicy(tries=len(answers)), sleep=sleep).call_with_retry(attempt, signer))


@pytest.mark.parametrize("status", [302, 403, 404, 511, 522])
def test_an_error_page_of_an_intermediary_stops_no_node(status: int) -> None:
    page = HttpResponse(status, PAGE, None)
    assert ask(page, page, HttpResponse(200, b"{}", None)).body == b"{}"
    with pytest.raises(UnreachableError, match=f"answered with status {status}"):
        ask(page, page)


def test_a_refusal_by_the_coordinator_is_final() -> None:
    with pytest.raises(RefusedError, match="banned"):
        ask(HttpResponse(403, WORD, None), HttpResponse(200, b"{}", None))


def test_without_a_key_every_refusal_is_final() -> None:
    """An object store, or an address that is not a coordinator: a server responds, and would respond the same again."""
    with pytest.raises(RefusedError, match="answered with status 404"):
        ask(HttpResponse(404, PAGE, None), HttpResponse(200, b"{}", None), signed=False)
