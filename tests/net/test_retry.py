"""An answer to a signed request counts only if the coordinator signed it for this request."""

import asyncio

import pytest

from shoal.commands.common import explain_error
from shoal.errors import UnreachableError
from shoal.identity.keys import Key
from shoal.identity.signer import RequestSigner
from shoal.net.client import HttpResponse
from shoal.net.retry import TRANSIT_CODES, RefusedError, RetryingClient, RetryPolicy

PAGE = b"<html>Welcome to our network</html>"
WORD = b'{"code":"banned","text":"this node is banned"}'


def ask(*answers: HttpResponse, signed: bool = True, slept: list[float] | None = None) -> HttpResponse:
    async def sleep(seconds: float) -> None:
        if slept is not None:
            slept.append(seconds)

    async def attempt() -> HttpResponse:
        return left.pop(0)

    left = list(answers)
    signer = RequestSigner(Key.generate(), "demo", Key.generate().public) if signed else None
    return asyncio.run(RetryingClient(RetryPolicy(tries=len(answers)), sleep=sleep).call_with_retry(attempt, signer))


@pytest.mark.parametrize("status", [302, 403, 404, 511, 522])
def test_an_error_page_of_an_intermediary_stops_no_node(status: int) -> None:
    page = HttpResponse(status, PAGE, None)
    assert ask(page, page, HttpResponse(200, b"{}", None, is_signed=True)).body == b"{}"
    with pytest.raises(UnreachableError, match=f"answered with status {status}"):
        ask(page, page)


def test_a_refusal_by_the_coordinator_is_final() -> None:
    with pytest.raises(RefusedError, match="banned"):
        ask(HttpResponse(403, WORD, None, is_signed=True), HttpResponse(200, b"{}", None, is_signed=True))


def test_an_unsigned_refusal_or_answer_stops_no_node_and_starts_nothing() -> None:
    good = HttpResponse(200, b'{"n":1}', None, is_signed=True)
    assert ask(HttpResponse(403, WORD, None), HttpResponse(200, b'{"n":2}', None), good) == good
    with pytest.raises(UnreachableError, match="did not sign this answer"):
        ask(HttpResponse(403, WORD, None), HttpResponse(200, b"{}", None))


def test_an_unsigned_refusal_moves_no_clock() -> None:
    late = b'{"code":"clock","server_time_ms":1,"text":"late"}'
    slept: list[float] = []
    ask(HttpResponse(401, late, None), HttpResponse(200, b"{}", None, is_signed=True), slept=slept)
    assert len(slept) == 1  # retried after a pause, like any other failure; a correction is retried at once


@pytest.mark.parametrize("code", sorted(TRANSIT_CODES))
def test_what_may_happen_to_a_request_on_its_way_is_not_final(code: str) -> None:
    refusal = HttpResponse(400, f'{{"code":"{code}","text":"no"}}'.encode(), None, is_signed=True)
    good = HttpResponse(200, b"{}", None, is_signed=True)
    assert ask(refusal, good) == good


def test_a_server_that_asks_to_wait_is_told_from_one_that_does_not_answer() -> None:
    words = b'{"code":"too_many","text":"too many requests; try again in 1 s"}'
    for is_signed in (True, False):
        with pytest.raises(UnreachableError, match="too many requests") as raised:
            ask(HttpResponse(429, words, None, is_signed=is_signed))
        assert raised.value.is_busy is is_signed
        assert explain_error(raised.value).startswith("too many" if is_signed else "the coordinator does not answer")


def test_without_a_key_every_refusal_is_final() -> None:
    """An object store, or an address that is not a coordinator: a server responds, and would respond the same again."""
    with pytest.raises(RefusedError, match="answered with status 404"):
        ask(HttpResponse(404, PAGE, None), HttpResponse(200, b"{}", None), signed=False)
