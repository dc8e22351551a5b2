"""One of four peers is hostile: each attack is refused, or its effect on the mean is bounded."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from fleet import QUICK

from shoal.diloco.codecs import find_codec
from shoal.diloco.http.averager import HttpAverager
from shoal.diloco.http.client import ReducerClient, ReducerUnavailableError, fetch_card
from shoal.diloco.http.messages import JoinAnswer, MessageError, make_offer, sign_message
from shoal.diloco.http.service import ReducerService, open_reducer
from shoal.diloco.http.settings import ReducerConfig, ReducerLimits
from shoal.diloco.outer import DilocoPlan, Rules
from shoal.diloco.round import RoundKey, Update
from shoal.diloco.state import OuterState, start_state
from shoal.errors import ConfigError
from shoal.identity.documents import Tag
from shoal.identity.keys import Key
from shoal.identity.routes import MAX_BODY_BYTES
from shoal.net.api_error import ApiError
from shoal.net.client import HttpClient, parse_endpoint
from shoal.net.retry import RefusedError

SIZE = 300
TRUTH = np.linspace(-1.0, 1.0, SIZE, dtype=np.float32)
PLAN = DilocoPlan("test", (SIZE,), Rules(interval=5, codec="fp32"))


@dataclass
class Cluster:
    """A reducer and four peers, the last of which is hostile."""

    service: ReducerService
    clients: list[ReducerClient]
    keys: list[Key]
    state: OuterState

    @property
    def evil(self) -> ReducerClient:
        return self.clients[-1]

    @property
    def round_key(self) -> RoundKey:
        return self.service.context.reducer.rounds[0].key

    def make_update(self, client: ReducerClient, values: np.ndarray, **changes: object) -> Update:
        payload = values.astype("<f4").tobytes()
        made = Update(self.round_key, client.peer, 100, 5, payload, "fp32")
        return replace(made, **changes)  # type: ignore[arg-type]

    async def close_round(self, key: RoundKey | None = None) -> tuple[np.ndarray, tuple[str, ...]]:
        """Let the honest peers deliver slightly different updates; returns the mean and the peers in it."""
        key = key or self.round_key
        for number, client in enumerate(self.clients[:3]):
            values = TRUTH * np.float32(0.99 + 0.01 * number)
            await deliver(client, self.make_update(client, values, key=key))
        outcome = await self.clients[0].fetch_outcome(key)
        assert outcome is not None
        return find_codec("fp32").decode(outcome.payload, SIZE), outcome.peers


async def deliver(client: ReducerClient, update: Update) -> None:
    offer = make_offer(update)
    answer = await client.offer(offer)
    if answer.status == "open":
        await client.send_update(offer, update.payload, answer.missing)


@asynccontextmanager
async def open_cluster(folder: Path, plan: DilocoPlan = PLAN, **changes: object) -> AsyncIterator[Cluster]:
    keys = sorted((Key.generate() for _ in range(4)), key=lambda key: key.public)
    peers = tuple(key.public for key in keys)
    config = ReducerConfig(port=0, start_peers=4, patience=QUICK, peers=peers).model_copy(update=changes)
    initial = start_state((np.zeros(SIZE, dtype=np.float32),))
    async with open_reducer(config, folder, plan, initial=initial) as service:
        running = asyncio.create_task(service.run())
        clients = [ReducerClient(parse_endpoint(service.url), key, plan, service.public) for key in keys]
        try:
            for client in clients:
                await client.join()
            yield Cluster(service, clients, keys, await clients[0].fetch_state())
            assert not running.done(), "no peer ends the reducer"
        finally:
            for client in clients:
                client.close()
            running.cancel()


def run_cluster(folder: Path, work: Callable[[Cluster], Awaitable[None]], **changes: object) -> None:
    async def run() -> None:
        async with asyncio.timeout(20), open_cluster(folder, **changes) as cluster:  # type: ignore[arg-type]
            await work(cluster)

    asyncio.run(run())


def assert_refused(error: pytest.ExceptionInfo[RefusedError], code: str) -> None:
    assert error.value.refusal.code == code


def assert_without_evil(cluster: Cluster, mean: np.ndarray, peers: tuple[str, ...]) -> None:
    assert cluster.evil.peer not in peers and len(peers) == 3
    np.testing.assert_allclose(mean, TRUTH, atol=0.02)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused_and_the_round_continues_without_them(tmp_path, bad) -> None:
    async def work(cluster: Cluster) -> None:
        values = TRUTH.copy()
        values[SIZE // 2] = bad
        with pytest.raises(RefusedError) as error:
            await deliver(cluster.evil, cluster.make_update(cluster.evil, values))
        assert_refused(error, "refused")
        assert_without_evil(cluster, *await cluster.close_round())

    run_cluster(tmp_path, work)


@pytest.mark.parametrize(
    "values", [np.full(SIZE, 1e30), -5.0 * TRUTH, -1.0 * TRUTH], ids=["1e30", "times -5", "sign flipped"]
)
def test_a_wild_update_moves_the_mean_no_further_than_the_honest_ones_lie_apart(tmp_path, values) -> None:
    async def work(cluster: Cluster) -> None:
        await deliver(cluster.evil, cluster.make_update(cluster.evil, values))
        mean, peers = await cluster.close_round()
        assert len(peers) == 4
        assert np.all(np.abs(mean - TRUTH) <= 0.0101 * np.abs(TRUTH) + 1e-6)

    run_cluster(tmp_path, work)


def test_a_claim_of_a_billion_tokens_weighs_at_most_twice_the_others(tmp_path) -> None:
    async def work(cluster: Cluster) -> None:
        await deliver(cluster.evil, cluster.make_update(cluster.evil, 2 * TRUTH, tokens=10**9))
        mean, peers = await cluster.close_round()
        assert len(peers) == 4
        share = 2 / 5
        np.testing.assert_allclose(mean, (1 - share) * TRUTH + share * 2 * TRUTH, rtol=0.02)

    plain = replace(PLAN, rules=Rules.model_validate({"codec": "fp32", "guard": {"mode": "mean"}}))
    run_cluster(tmp_path, work, plan=plain)


def test_a_stale_round_is_refused(tmp_path) -> None:
    async def work(cluster: Cluster) -> None:
        old = cluster.round_key
        assert_without_evil(cluster, *await cluster.close_round())
        with pytest.raises(RefusedError) as error:
            await deliver(cluster.evil, cluster.make_update(cluster.evil, TRUTH, key=old))
        assert_refused(error, "stale")
        with pytest.raises(RefusedError) as error:
            await deliver(cluster.evil, cluster.make_update(cluster.evil, TRUTH, key=replace(old, round=7)))
        assert_refused(error, "stale")

    run_cluster(tmp_path, work)


def test_an_update_from_another_base_or_for_another_fragment_is_refused(tmp_path) -> None:
    async def work(cluster: Cluster) -> None:
        for changes, code in (({"base": "ab" * 32}, "wrong_base"), ({"fragment": 3}, "not_found")):
            key = replace(cluster.round_key, **changes)
            with pytest.raises(RefusedError) as error:
                await deliver(cluster.evil, cluster.make_update(cluster.evil, TRUTH, key=key))
            assert_refused(error, code)
        assert_without_evil(cluster, *await cluster.close_round())

    run_cluster(tmp_path, work)


def test_a_truncated_or_swollen_update_is_refused_before_anything_is_kept_for_it(tmp_path) -> None:
    async def work(cluster: Cluster) -> None:
        for values in (TRUTH[:-1], np.zeros(1 << 20)):
            with pytest.raises(RefusedError) as error:
                await deliver(cluster.evil, cluster.make_update(cluster.evil, values))
            assert_refused(error, "length")
        assert not cluster.service.context.reducer.rounds[0].incoming
        update = cluster.make_update(cluster.evil, TRUTH)
        offer = make_offer(update)
        await cluster.evil.offer(offer)
        with pytest.raises(RefusedError) as error:
            await cluster.evil.send_update(offer, update.payload[:-4], [(0, 1)])
        assert_refused(error, "length")
        assert_without_evil(cluster, *await cluster.close_round())

    run_cluster(tmp_path, work)


def test_bytes_that_differ_from_the_offer_are_refused(tmp_path) -> None:
    async def work(cluster: Cluster) -> None:
        offer = make_offer(cluster.make_update(cluster.evil, TRUTH))
        await cluster.evil.offer(offer)
        with pytest.raises(RefusedError) as error:
            await cluster.evil.send_update(offer, (-TRUTH).tobytes(), [(0, 1)])
        assert_refused(error, "digest")
        assert (await cluster.evil.offer(offer)).missing == ((0, 1),), "it may still send what it offered"

    run_cluster(tmp_path, work)


def test_one_peer_counts_once_and_cannot_change_its_mind(tmp_path) -> None:
    async def work(cluster: Cluster) -> None:
        update = cluster.make_update(cluster.evil, TRUTH)
        await deliver(cluster.evil, update)
        assert (await cluster.evil.offer(make_offer(update))).status == "delivered", "the same again is no matter"
        with pytest.raises(RefusedError) as error:
            await deliver(cluster.evil, cluster.make_update(cluster.evil, -TRUTH))
        assert_refused(error, "second")
        _, peers = await cluster.close_round()
        assert sorted(peers) == sorted(client.peer for client in cluster.clients)

    run_cluster(tmp_path, work)


def test_a_request_heard_before_and_an_offer_of_another_peer_are_refused(tmp_path) -> None:
    async def work(cluster: Cluster) -> None:
        place, honest = parse_endpoint(cluster.service.url), cluster.clients[0]
        from shoal.diloco.http.messages import sign_message
        from shoal.identity.signer import RequestSigner

        document = sign_message(cluster.keys[0], Tag.UPDATE, make_offer(cluster.make_update(honest, TRUTH)))
        signer = RequestSigner(cluster.keys[0], "test", cluster.service.public)
        headers = signer.sign_request("POST", "/v1/diloco/offers", document)
        link = HttpClient(place)
        answers = [await link.ask("POST", "/v1/diloco/offers", headers, document, 4096) for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 401] and b"replay" in answers[1].body
        signer = RequestSigner(cluster.keys[-1], "test", cluster.service.public)
        headers = signer.sign_request("POST", "/v1/diloco/offers", document)
        stolen = await link.ask("POST", "/v1/diloco/offers", headers, document, 4096)
        link.close()
        assert stolen.status == 403 and b"other_peer" in stolen.body

    run_cluster(tmp_path, work)


def test_unsigned_requests_and_unknown_peers_are_refused(tmp_path) -> None:
    async def work(cluster: Cluster) -> None:
        link = HttpClient(parse_endpoint(cluster.service.url))
        for method, path in (
            ("POST", "offers"),
            ("GET", "state"),
            ("POST", "join"),
            ("PUT", f"updates/0/0/{'a' * 64}/0"),
        ):
            answer = await link.ask(method, f"/v1/diloco/{path}", [], b"", 4096)
            assert answer.status == 401 and b"unsigned" in answer.body
        link.close()
        stranger = ReducerClient(parse_endpoint(cluster.service.url), Key.generate(), PLAN, cluster.service.public)
        with pytest.raises(RefusedError) as error:
            await stranger.fetch_state()
        assert_refused(error, "unknown_node")
        stranger.close()

    run_cluster(tmp_path, work)


def test_a_run_that_lists_its_peers_accepts_no_other(tmp_path) -> None:
    async def work() -> None:
        key, other = Key.generate(), Key.generate()
        config = ReducerConfig(port=0, peers=(key.public,), limits=ReducerLimits(open_work=64))
        initial = start_state((np.zeros(SIZE, dtype=np.float32),))
        async with open_reducer(config, tmp_path, PLAN, initial=initial) as service:
            place = parse_endpoint(service.url)
            invited, stranger = (ReducerClient(place, who, PLAN, service.public) for who in (key, other))
            assert (await invited.join()).is_member
            with pytest.raises(RefusedError) as error:
                await stranger.join()
            assert_refused(error, "not_invited")
            assert f"{other.public} is not in the run's list of peers" in str(error.value)
            invited.close()
            stranger.close()

    asyncio.run(work())


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_sybils_move_the_mean_by_no_more_than_the_share_that_the_operator_gives_them(tmp_path, share) -> None:
    """Sixteen new keys with any claim and any value, all faster than the peers of the run."""

    async def work(cluster: Cluster) -> None:
        place, public = parse_endpoint(cluster.service.url), cluster.service.public
        sybils = [ReducerClient(place, Key.generate(), PLAN, public) for _ in range(16)]
        for sybil in sybils:
            assert not (await sybil.join()).is_member
        stranger = ReducerClient(place, Key.generate(), PLAN, public)
        with pytest.raises(ReducerUnavailableError, match="maximum number"):
            await stranger.join()
        with pytest.raises(RefusedError) as error:
            await deliver(sybils[0], cluster.make_update(sybils[0], -2 * TRUTH))
        assert_refused(error, "not_member")
        await cluster.evil.leave()
        await cluster.close_round()  # they are members from here on
        for _ in range(3):  # and make themselves a record
            key, fetched = cluster.round_key, cluster.clients[0].fetch_outcome
            for sybil in sybils:
                await deliver(sybil, cluster.make_update(sybil, -1000 * TRUTH, key=key, tokens=10**9))
            mean, peers = await cluster.close_round(key)
            assert len(peers) == 19 and (await fetched(key)) is not None
            distance = np.linalg.norm(mean - TRUTH) / np.linalg.norm(TRUTH)
            assert distance <= share / (1 + share) * (1 + PLAN.rules.guard.clip) * 1.02
        assert distance > 0.9 * share / (1 + share) * (1 + PLAN.rules.guard.clip), "the bound is reached"
        for client in (*sybils, stranger):
            client.close()

    limits = ReducerLimits(join_work=1, open_work=1, record_rounds=2)
    run_cluster(tmp_path, work, open_share=share, limits=limits)


def test_a_reducer_without_named_peers_does_not_start(tmp_path) -> None:
    async def work(**changes: object) -> None:
        async with open_reducer(ReducerConfig(port=0).model_copy(update=changes), tmp_path, PLAN):
            pass

    for changes in ({}, {"open_share": 0.5}, {"peers": ("ab" * 32,), "start_peers": 2}):
        with pytest.raises(ConfigError, match="--peer KEY"):
            asyncio.run(work(**changes))


def test_joining_costs_more_for_a_peer_that_is_not_named(tmp_path) -> None:
    async def work(cluster: Cluster) -> None:
        place, public = parse_endpoint(cluster.service.url), cluster.service.public
        clients = [ReducerClient(place, key, PLAN, public) for key in (cluster.keys[0], Key.generate())]
        named, other = [await client._ask("GET", f"challenges/{client.peer}", b"", 1024) for client in clients]
        assert int(other.split(b".")[2]) >= 256 * int(named.split(b".")[2])
        for client in clients:
            client.close()

    run_cluster(tmp_path, work, open_share=0.1)


def test_plans_and_outcomes_of_another_reducer_are_not_accepted(tmp_path) -> None:
    async def work(cluster: Cluster) -> None:
        place = parse_endpoint(cluster.service.url)
        assert (await fetch_card(place, cluster.service.public))[1] == PLAN
        with pytest.raises(MessageError):
            await fetch_card(place, Key.generate().public)

    run_cluster(tmp_path, work)


def test_an_offer_too_long_for_the_chain_is_refused_and_the_round_closes(tmp_path) -> None:
    async def work(cluster: Cluster) -> None:
        update = cluster.make_update(cluster.evil, TRUTH)
        short = len(sign_message(cluster.keys[-1], Tag.UPDATE, make_offer(update)))
        lanes = tuple((lane % 4, 10**15 + lane) for lane in range((MAX_BODY_BYTES - short) // 21))  # of 21 characters
        update = replace(update, lanes=lanes)
        with pytest.raises(RefusedError) as error:
            await deliver(cluster.evil, update)
        assert_refused(error, "length")
        await cluster.evil.leave()
        assert_without_evil(cluster, *await cluster.close_round())

    run_cluster(tmp_path, work, plan=replace(PLAN, num_lanes=4))


@pytest.mark.parametrize("tries", [1, 3])
def test_a_challenge_that_expired_meanwhile_is_only_replaced_by_another(tmp_path, monkeypatch, tries) -> None:
    """For example after a restart of the reducer, or when many peers join."""
    join, left = ReducerClient.join, [ApiError(401, "work", "the challenge has expired")] * tries

    async def join_late(client: ReducerClient) -> JoinAnswer:
        if left:
            raise RefusedError(left.pop())
        return await join(client)

    async def work(cluster: Cluster) -> None:
        monkeypatch.setattr(ReducerClient, "join", join_late)
        averager = HttpAverager(PLAN, cluster.keys[0], [parse_endpoint(cluster.service.url)], cluster.service.public)
        try:
            async with asyncio.timeout(10):
                while averager.rounds != (0,):  # only the presence task receives rounds
                    await asyncio.sleep(0.02)
        finally:
            await asyncio.to_thread(averager.close)

    run_cluster(tmp_path, work)
