"""One training step: groups in, updated weights and metrics out.

    step n:  groups -> samples (advantages) -> `updates` parts -> packs -> loss, backward -> clip -> AdamW

- The denominator of an update is fixed over all its samples before packing, so packed, padded and accumulated gradients
  are equal.
- pi_old is the policy before the step's first update. For the first part the training forward pass computes it; the
  other parts are scored in advance.
- Only parameters that require gradients are trained. With adapters (policy/lora.py) these are A and B, and the
  reference of the KL term is the same model with its adapters disabled.
- An update whose log-probs or gradient are not finite is skipped and counted; the weights are unchanged.
- Several ranks (learner/parallel.py) are given the same groups and compute the same update and metrics as one.
- Weights, gradients, optimizer state and everything after the logits are float32, whatever `learner.precision` is.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.config.run import LearnerConfig, LengthConfig
from shoal.errors import ConfigError
from shoal.learner.advantage import NO_LENGTH, build_samples
from shoal.learner.correction import Correction, build_correction
from shoal.learner.logprobs import kl_k3
from shoal.learner.losses import LOSSES
from shoal.learner.losses.base import LossInputs, sum_tokens
from shoal.learner.metrics import NUM_TERMS, UpdateMetrics, describe_step, list_numbers
from shoal.learner.parallel import ONE, Ranks, Share, clip_gradients, deal_packs, measure_norm, score_model
from shoal.policy.decoder import LayerOptions, is_lean, set_layer_options
from shoal.policy.lora import disable_adapters, find_adapted
from shoal.policy.packing import Pack, Sample, build_packs
from shoal.rollout import Group

Metrics = dict[str, float]


class Learner:
    """A model, its optimizer and the loss; `reference` is the frozen policy of the KL term, if it is another one."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        *,
        max_tokens: int,
        reference: PreTrainedModel | None = None,
        length: LengthConfig = NO_LENGTH,
        ranks: Ranks = ONE,
    ) -> None:
        needs_reference = config.loss.kl > 0 and not find_adapted(model)
        assert (reference is not None) == needs_reference, "a reference is needed exactly if there is a KL term"
        self.model = model.eval()  # no dropout: sampler and learner must agree on the policy
        for own in (model, reference):
            if own is not None:
                set_layer_options(own, LayerOptions(config.gradient_checkpointing, config.compile))
        self.optimizer = torch.optim.AdamW(
            list_trained(model).values(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )
        self.ranks = ranks
        self.num_updates = 0
        self._config = config
        self._loss = LOSSES[config.loss.name]
        self._max_tokens = max_tokens
        self._reference = reference
        self._length = length
        self._device = model.device if ranks.mesh is None else ranks.device
        self._dtype = _choose_dtype(model, config, ranks)
        if config.attention == "flex" and self._device.type == "cpu":
            raise ConfigError('learner.attention: "flex" has no backward pass on the CPU; use "auto" or "packed"')
        if config.offload and ranks.mesh is None:
            raise ConfigError("learner.offload: FSDP2 moves weights to the host, one process does not; add --nproc 1")

    def train_step(self, groups: Sequence[Group]) -> Metrics:
        """Train on the groups of one batch; an empty batch changes nothing."""
        split = _split_parts(groups, self._config.updates)
        parts = [build_samples(part, self._config.advantage, self._length) for part in split]
        parts_packs = [self._build_packs(samples) for samples in parts]
        dealt = [self._deal(packs) for packs in parts_packs]
        olds = [self._score_old(own, first=index == 0) for index, own in enumerate(dealt)]
        return describe_step([self._update(*update) for update in zip(parts, parts_packs, dealt, olds, strict=True)])

    def _build_packs(self, samples: Sequence[Sample]) -> list[Pack]:
        """Micro-batches on the host, at least one per rank if the samples allow it."""
        most, ranks = self._config.micro_tokens, self.ranks.size
        if ranks > 1:
            prompts = {sample.group: len(sample.rollout.prompt_ids) for sample in samples}
            total = sum(prompts.values()) + sum(sample.rollout.num_tokens for sample in samples)
            most = min(most, -(-total // ranks))
        return build_packs(samples, most, share=self._config.share)

    def _deal(self, packs: Sequence[Pack]) -> list[tuple[Share, Pack]]:
        """The micro-batches of this rank, on its device."""
        shares = deal_packs([len(pack.token_ids) for pack in packs], self.ranks)
        return [(share, packs[share.index].to(self._device, self._config.attention)) for share in shares]

    def _score_old(self, own: Sequence[tuple[Share, Pack]], *, first: bool) -> list[Tensor | None]:
        """log pi_old of each pack; None if the training pass itself computes it."""
        if self._config.old_logprobs == "behaviour":
            return [pack.behaviour for _, pack in own]
        if first:
            return [None for _ in own]
        with torch.no_grad():
            return [score_model(self.model, pack, dtype=self._dtype).logprobs for _, pack in own]

    def _update(
        self,
        samples: Sequence[Sample],
        packs: Sequence[Pack],
        own: Sequence[tuple[Share, Pack]],
        olds: Sequence[Tensor | None],
    ) -> UpdateMetrics:
        lengths = torch.tensor([sample.rollout.num_tokens for sample in samples])
        weights = self._loss.sample_weights(lengths, self._max_tokens)
        weight_of = {id(sample): float(weight) for sample, weight in zip(samples, weights, strict=True)}
        numbers = torch.zeros(len(packs), NUM_TERMS, dtype=torch.float64, device=self._device)
        self.optimizer.zero_grad(set_to_none=True)
        for (share, pack), old in zip(own, olds, strict=True):
            values = [weight_of[id(sample)] * share.counts for sample in pack.samples]
            found = self._backward(pack, torch.tensor(values, device=self._device), old)
            if share.counts:
                numbers[share.index] = found
        return self._apply(packs, self.ranks.sum(numbers))

    def _backward(self, pack: Pack, weights: Tensor, old: Tensor | None) -> Tensor:
        """Add the gradient of one micro-batch, and return its numbers for the metrics."""
        config = self._config.loss
        scores = score_model(self.model, pack, entropy_grad=config.entropy > 0, dtype=self._dtype)
        current = scores.logprobs.detach()
        old = current if old is None else old
        # Not read here, which would wait for the device: `UpdateMetrics.read` skips the whole update if it is false.
        finite = torch.isfinite(current + old).all()
        old, current = old.nan_to_num(), current.nan_to_num()
        inputs = LossInputs(
            logprobs=scores.logprobs,
            old_logprobs=old,
            advantages=pack.spread([sample.advantage for sample in pack.samples]),
            segment=pack.segment,
            num_segments=len(pack.samples),
        )
        output = self._loss.token_loss(inputs, config)
        correction = self._correct(pack, current, old)
        policy = sum_tokens(correction.weights * output.token_loss, weights, pack.segment)
        entropy = sum_tokens(scores.entropy, weights, pack.segment)
        kl = sum_tokens(self._kl_tokens(pack, scores.logprobs), weights, pack.segment)
        total = policy + config.kl * kl - config.entropy * entropy
        total.backward()  # type: ignore[no-untyped-call]
        terms = {"total": total, "policy": policy, "kl": kl, "entropy": scores.entropy}
        return list_numbers(finite, output=output, correction=correction, **terms)

    def _correct(self, pack: Pack, current: Tensor, old: Tensor) -> Correction:
        """Weights of the policy term, and how far the policy is from the sampler's."""
        config = self._config.loss
        size = len(pack.samples)
        if self._config.old_logprobs == "behaviour":
            # The ratio is relative to the sampler itself: nothing to correct, but still to report.
            return build_correction(current, pack.behaviour, pack.segment, size, kind="none", cap=1.0)
        return build_correction(
            old, pack.behaviour, pack.segment, size, kind=config.correction, cap=config.correction_cap
        )

    def _kl_tokens(self, pack: Pack, logprobs: Tensor) -> Tensor:
        if not self._config.loss.kl:
            return torch.zeros_like(logprobs)
        with torch.no_grad(), disable_adapters(self.model):
            reference = score_model(self._reference or self.model, pack, dtype=self._dtype).logprobs
        return kl_k3(logprobs, reference)

    def _apply(self, packs: Sequence[Pack], numbers: Tensor) -> UpdateMetrics:
        """Clip and step, unless anything is not finite."""
        config, tally = self._config, UpdateMetrics()
        tally.lr = config.lr * min(1.0, (self.num_updates + 1) / max(config.warmup_steps, 1))
        parameters = list(list_trained(self.model).values())
        norm = measure_norm(parameters, self.ranks)
        tally.read(packs, numbers, norm)
        if tally.skipped:
            return tally
        clip_gradients(parameters, norm, config.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = tally.lr
        self.optimizer.step()
        self.num_updates += 1
        return tally


def _choose_dtype(model: PreTrainedModel, config: LearnerConfig, ranks: Ranks) -> torch.dtype | None:
    """What a plain process casts weights to inside its forward pass; FSDP2 casts by itself."""
    if config.precision == "float32" or ranks.mesh is not None:
        return None
    if not is_lean(model):
        name = model.config.model_type
        raise ConfigError(f'learner.precision: "bfloat16" with {name} needs FSDP2; add --nproc 1')
    return torch.bfloat16


def list_trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that an optimizer holds, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _split_parts(groups: Sequence[Group], num: int) -> list[list[Group]]:
    """Consecutive groups for each update, as even as whole groups allow; no part is empty."""
    num = min(num, len(groups))
    bounds = [round(index * len(groups) / num) for index in range(num + 1)] if num else []
    return [list(groups[start:end]) for start, end in pairwise(bounds)]
