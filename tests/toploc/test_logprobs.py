"""Claimed against recomputed log-probs."""

import numpy as np

from shoal.toploc.token_checks import compare_logprobs


def test_the_difference_has_a_sign() -> None:
    gaps = compare_logprobs(np.array([-1.0, -2.0], dtype=np.float32), np.array([-1.5, -1.5], dtype=np.float32))
    assert gaps.tolist() == [0.5, -0.5] and gaps.dtype == np.float64


def test_what_is_no_log_prob_is_infinitely_far_off() -> None:
    claims = np.array([np.nan, np.inf, -np.inf, 0.1, 0.0, 5e-7, -3e38], dtype=np.float32)
    gaps = compare_logprobs(claims, np.zeros(7, dtype=np.float32))
    assert np.isinf(gaps).tolist() == [True, True, True, True, False, False, False]
    assert not np.isnan(gaps).any()


def test_an_impossible_token_is_infinitely_far_off() -> None:
    assert compare_logprobs(np.array([-1.0, -np.inf]), np.array([-np.inf, -np.inf])).tolist() == [np.inf, np.inf]
