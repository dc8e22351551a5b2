"""What rank 0 sends to the other ranks."""

import numpy as np

from shoal.rollout import Finish, Group, Rollout, Score, VersionRange
from shoal.train.rank_calls import decode_groups, encode_groups


def test_groups_survive_the_way_to_another_rank() -> None:
    def make(index: int, sizes: tuple[int, ...]) -> Group:
        rng = np.random.default_rng(index)
        rollouts = tuple(
            Rollout(
                id=f"{index}.{n}",
                prompt_ids=rng.integers(0, 99, 3 + index, dtype=np.int32),
                token_ids=rng.integers(0, 99, size, dtype=np.int32),
                logprobs=-rng.random(size, dtype=np.float32),
                finish=Finish.STOP if n else Finish.LENGTH,
                versions=(VersionRange(3, 0, 1), VersionRange(4, 1, size)),
                temperature=0.7,
                seed=2**63 + n,
            )
            for n, size in enumerate(sizes)
        )
        scores = tuple(Score(0.1 * n, "é") for n in range(len(sizes)))
        return Group(index=index, task_id="a\nb", rollouts=rollouts, scores=scores)

    groups = [make(0, (1, 5)), make(4, (2, 3, 4))]
    found = decode_groups(encode_groups(groups))
    assert [(g.index, g.task_id, g.scores) for g in found] == [(g.index, g.task_id, g.scores) for g in groups]
    pairs = zip(*([r for group in part for r in group.rollouts] for part in (found, groups)), strict=True)
    for mine, theirs in pairs:
        for name in ("prompt_ids", "token_ids", "logprobs"):
            one, other = getattr(mine, name), getattr(theirs, name)
            assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
        names = ("id", "finish", "versions", "temperature", "seed")
        assert [getattr(mine, name) for name in names] == [getattr(theirs, name) for name in names]
    assert decode_groups(encode_groups([])) == []
