"""GSPO: ratio and clip of whole sequences (arXiv 2507.18071).

    l_t = -min( s_i A,  clip(s_i, 1 - eps_low, 1 + eps_high) A )   for every token t of sample i
    s_i = exp( 1/|o_i| sum_t (log pi_theta(o_t) - log pi_old(o_t)) )

What differs from GRPO: a sample is kept or clipped as a whole, and its tokens share one ratio, the geometric mean. The
gradient flows through that mean (not the GSPO-token variant): d l / d log pi(o_t) = -s_i A / |o_i| for each token.
s_i is far closer to 1 than a token's ratio: the paper uses eps_low = 3e-4, eps_high = 4e-4; with 0.2 nothing is ever
clipped.

The bound of the log-ratio applies to the mean, the quantity that is exponentiated. The mean needs whole samples in a
micro-batch.

Normalisation: 1/S sum_s, written as 1/S sum_s 1/|o_s| sum_t over |o_s| equal terms.
"""

from torch import Tensor

from shoal.config.run import LossConfig
from shoal.learner.losses.base import LossInputs, LossOutput, average_segments, clip_ratio, weigh_sequences


def token_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """l_t = -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A) with the sequence ratio s of the token's sample."""
    log_ratio = average_segments(inputs.logprobs - inputs.old_logprobs, inputs.segment, inputs.num_segments)
    return clip_ratio(log_ratio[inputs.segment], inputs.advantages, config)


def sample_weights(lengths: Tensor, max_tokens: int) -> Tensor:
    """w_s = 1 / (S |o_s|)."""
    return weigh_sequences(lengths)
