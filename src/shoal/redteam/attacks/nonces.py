"""Requests that are sent again: whoever sees one on its way might have it counted twice, or used elsewhere.

Every nonce counts once for its node, whatever the path, and is kept for longer than its request could be good.
"""

import os

from shoal.redteam.camp import Camp, Recruit
from shoal.swarm.clock import read_clock

BEAT, TARGET = b'{"version":0}', "/v1/heartbeat"
REPLAY, CLOCK, FORGED = ("replay",), ("clock",), ("signature",)


async def attack(camp: Camp) -> None:
    """At once, from elsewhere, at other times, on other paths, with other verbs."""
    node, nonce = await camp.join(), os.urandom(16)
    lines = camp.sign(node, "POST", TARGET, BEAT, draw_bytes=lambda _: nonce)
    await send_good(camp, lines, BEAT)
    await camp.try_raw("the same request at once", REPLAY, lines, BEAT)
    await camp.try_raw("the same from another address", REPLAY, lines, BEAT, source=camp.find_source(0))
    for method, target, body in (("POST", "/v1/leave", b""), ("GET", "/v1/batches/1", b"")):
        signed = camp.sign(node, method, target, body, draw_bytes=lambda _: nonce)
        await camp.try_raw(f"its nonce, signed for {method} {target}", REPLAY, signed, body)
    await shift_clock(camp, node)
    await alter_request(camp, node)


async def send_good(camp: Camp, lines: list[str], body: bytes) -> None:
    """Send what must be taken, or its copies would prove nothing."""
    answer = await camp.send(lines, body)
    camp.evidence.count("good" if answer.status == 200 else "good_but_refused")


async def shift_clock(camp: Camp, node: Recruit) -> None:
    """Requests of other times: too old, from the future, and one that is dated ahead to be good for longer."""
    for skew_s in (-3600, -301, -62, 62, 3600):
        old = camp.sign(node, "POST", TARGET, BEAT, clock_ms=lambda skew_s=skew_s: read_clock() + 1000 * skew_s)
        await camp.try_raw(f"a request signed {skew_s:+d} s from now", CLOCK, old, BEAT)
    ahead = camp.sign(node, "POST", TARGET, BEAT, clock_ms=lambda: read_clock() + 50_000)
    await send_good(camp, ahead, BEAT)
    await camp.try_raw("one dated ahead, again", REPLAY, ahead, BEAT)


async def alter_request(camp: Camp, node: Recruit) -> None:
    """A request that was seen and not yet used, changed in what makes it one: time, nonce, path, verb."""
    lines = camp.sign(node, "POST", TARGET, BEAT)
    created = next(part for part in lines[-2].split(";") if part.startswith("created="))
    later = [line.replace(created, f"created={int(created[8:]) + 30}") for line in lines]
    await camp.try_raw("its time made younger", FORGED, later, BEAT)
    nonce = lines[-2].partition('nonce="')[2][:32]
    fresh = [line.replace(nonce, os.urandom(16).hex()) for line in lines]
    await camp.try_raw("another nonce put in", FORGED, fresh, BEAT)
    await camp.try_raw("another path", FORGED, ["POST /v1/leases HTTP/1.1", *lines[1:]], BEAT)
    await camp.try_raw("a query added", FORGED, [f"POST {TARGET}?a=1 HTTP/1.1", *lines[1:]], BEAT)
    await camp.try_raw("another verb", ("method", "signature"), [f"PUT {TARGET} HTTP/1.1", *lines[1:]], BEAT)
    await send_good(camp, lines, BEAT)
    await camp.try_raw("and once it was used", REPLAY, lines, BEAT)
