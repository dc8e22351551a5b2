"""When a no is final: when it is the coordinator's."""

import asyncio

import pytest

from shoal.keys import Key
from shoal.swarm.asking import Asker, Patience, RefusedError, UnreachableError
from shoal.swarm.client_auth import RequestSigner
from shoal.swarm.link import Answer

PAGE = b"<html>Welcome to our network</html>"
WORD = b'{"code":"banned","text":"this node is banned"}'


def ask(*answers: Answer, signed: bool = True) -> Answer:
    async def sleep(seconds: float) -> None:
        pass

    async def attempt() -> Answer:
        return left.pop(0)

    left = list(answers)
    signer = RequestSigner(Key.generate(), "demo", Key.generate().public) if signed else None
    return asyncio.run(Asker(Patience(tries=len(answers)), sleep=sleep).persist(attempt, signer))


@pytest.mark.parametrize("status", [302, 403, 404, 511, 522])
def test_a_page_of_somebody_on_the_way_ends_no_node(status: int) -> None:
    page = Answer(status, PAGE, None)
    assert ask(page, page, Answer(200, b"{}", None)).body == b"{}"
    with pytest.raises(UnreachableError, match=f"answered with status {status}"):
        ask(page, page)


def test_a_no_of_the_coordinators_is_final() -> None:
    with pytest.raises(RefusedError, match="banned"):
        ask(Answer(403, WORD, None), Answer(200, b"{}", None))


def test_who_asks_without_a_key_hears_every_no() -> None:
    """A store, or an address that is no coordinator's: somebody is there, and would say the same again."""
    with pytest.raises(RefusedError, match="answered with status 404"):
        ask(Answer(404, PAGE, None), Answer(200, b"{}", None), signed=False)
