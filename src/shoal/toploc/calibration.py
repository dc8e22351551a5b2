"""The calibration file: what honest rollouts of a model measure, and the thresholds that follow.

- The stated rate is the false alarms per rollout, all checks together, for a rollout as long as the model's context:
  it is shared evenly by the checks that can err (SHARES). A check on chunks gives half of its share to the full chunks
  of the longest rollout and half to the last, short one, and divides by how rare the rarest variant is among the
  samples: the rate holds for a node that always runs the least favourable variant.
- Thresholds and bets come from samples (calibrate/calibrate.py); each records how far it is proven and how far it is
  extrapolated.
- Noise depends on architecture, dtype, the way of computing and, in bfloat16, on the weights: sharper ones are noisier.
  In float32 the floors are above all of it, and a file is valid for every version of a run. In bfloat16 it is valid for
  weights similar to those measured, and a run calibrates again as it learns. A model of another shape is refused.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, ValidationError, model_validator
from transformers import PreTrainedModel

from shoal.config.run import Settings
from shoal.errors import ConfigError
from shoal.policy.lora import base_weights
from shoal.toploc.chunks import ChunkStats
from shoal.toploc.finding import Check
from shoal.toploc.rivals import Rival, RivalBets
from shoal.toploc.sequential_test import CALIBRATED, Bet, BetTable, EvidenceStream
from shoal.toploc.threshold import Method
from shoal.util.files import write_output

LIMITED = {
    Check.EXPONENT: "exponent",
    Check.MANTISSA: "mantissa",
    Check.MEDIAN: "median",
    Check.SIGN: "sign",
    Check.SAMPLING: "distance",
    Check.LOGPROB: "logprob",
}
"""Checks with a threshold per chunk, and the statistic of each."""
SHARES = len(LIMITED) + 7
"""Checks that share the rate: those above, places outside, end probability, hazard, shape, tail, sequence, rivals."""
_VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}

Share = Annotated[float, Field(gt=0.0, lt=1.0)]


class Limit(Settings):
    """The threshold of one check, what honest chunks measured, and how certain it is."""

    threshold: float
    method: Method
    """order: proven by the samples; tail, margin: extrapolated; floor: allowance for other machines"""
    rate: float
    """target rate of false alarms per chunk"""
    proven: float
    """upper confidence limit of false alarms per chunk, from the samples alone"""
    num_samples: int
    quantiles: dict[str, float]
    """of honest chunks: "0.5", "0.9", "0.99", "0.999", "1" (the largest)"""


class ChunkLimits(Settings):
    """The limits of one kind of chunks, full or short ones."""

    limits: dict[Check, Limit]
    bets: dict[EvidenceStream, Bet]

    @model_validator(mode="after")
    def _is_complete(self) -> "ChunkLimits":
        if set(self.limits) != set(LIMITED) or set(self.bets) != set(CALIBRATED):
            raise ValueError("every check needs a limit and every stream a bet")
        return self


class Variant(Settings):
    """One honest way of computing that was measured, or the reason why it was not."""

    name: str
    rollouts: int = 0
    chunks: int = 0
    tokens: int = 0
    skipped: str = ""


class Power(Settings):
    """How surely one way of using other weights is found."""

    attack: str
    rollouts: int
    """that were measured"""
    tokens: float
    """mean length of these"""
    found: float = Field(ge=0.0, le=1.0)
    """lower confidence limit of the share of rollouts that one check alone rejects"""
    rival: Rival | None = None
    """that the work leans to most; None in float32, where nothing is compared with rivals"""
    odds: tuple[float, ...] = ()
    """logarithm of the odds of each measured rollout against that rival"""

    @property
    def gain(self) -> float:
        """Nats that one replayed rollout adds on average."""
        return float(np.mean(self.odds)) if self.odds else 0.0


class Calibration(Settings):
    """Everything that a verifier needs to know about honest noise."""

    format: Literal[2] = 2
    model: str
    """folder or hub id that was calibrated"""
    model_hash: str
    """hash of the architecture, see `hash_model`"""
    weights_hash: str
    """hash of the weights that were measured; informative"""
    backend: str
    dtype: str
    torch_version: str
    temperature: float
    """lowest sampling temperature that the thresholds are valid for: noise in log-probs grows as 1 / temperature"""
    max_tokens: int = Field(ge=1)
    """longest rollout that the rate is valid for"""
    rate: Share
    """false alarms per rollout, all checks together"""
    confidence: Share
    """confidence of all thresholds together"""
    variants: tuple[Variant, ...]
    full: ChunkLimits
    """chunks of 32 tokens"""
    short: ChunkLimits
    """last chunks of fewer tokens"""
    heldout_rollouts: int
    """honest rollouts judged by thresholds that were computed without them"""
    heldout_alarms: int
    rivals: dict[Rival, RivalBets] = Field(default={})
    """bets that work was made with other weights; empty in float32, where no such bet is needed"""
    honest_odds: dict[Rival, tuple[float, ...]] = Field(default={})
    """logarithm of the odds of each measured honest rollout"""
    power: tuple[Power, ...] = ()
    """empty if it was not measured"""

    @property
    def share(self) -> float:
        """False alarms per rollout that one check may cause."""
        return self.rate / SHARES

    @property
    def bets(self) -> BetTable:
        return {True: self.full.bets, False: self.short.bets}

    def limit_chunk(self, check: Check, chunk: ChunkStats) -> float:
        """The threshold of a check on this chunk."""
        return (self.full if chunk.is_full else self.short).limits[check].threshold

    def save(self, path: Path) -> None:
        write_output(path, (self.model_dump_json(indent=2) + "\n").encode())


def load_calibration(path: Path, model: PreTrainedModel | None = None) -> Calibration:
    """Load a calibration file; ConfigError if it is invalid or for another model or dtype than `model`."""
    try:
        calibration = Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"{path}: not a calibration file: {where}: {first['msg']}") from None
    if model is not None:
        check_model(calibration, model, str(path))
    return calibration


def hash_model(model: PreTrainedModel) -> str:
    """SHA-256 of what decides a model's arithmetic except the weights' values: settings and tensor shapes.

    Adapters do not count: a model with adapters computes what it does with these merged, and is calibrated like that.
    """
    settings = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    shapes = {name: list(tensor.shape) for name, tensor in base_weights(model).items()}
    text = json.dumps([settings, shapes], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_weights(model: PreTrainedModel) -> str:
    """SHA-256 of all tensors by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + b"\0")
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_model(calibration: Calibration, model: PreTrainedModel, path: str = "calibration") -> None:
    """Reject a model of another shape or dtype than was calibrated."""
    if calibration.model_hash != hash_model(model):
        names = f"{calibration.model_hash[:12]} ({calibration.model}), this one is {hash_model(model)[:12]}"
        raise ConfigError(f"{path}: is for another model, {names}: run `shoal calibrate` on this one")
    dtype = str(model.dtype).removeprefix("torch.")
    if calibration.dtype != dtype:
        raise ConfigError(f"{path}: is for {calibration.dtype}, the model is loaded in {dtype}")
