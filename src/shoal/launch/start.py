"""Version 0 of a run, on disk and calibrated. The one part of getting ready that needs torch."""

from pathlib import Path

from shoal.config import RunConfig
from shoal.files import atomic_dir
from shoal.policy.model import Policy, open_policy, save_policy
from shoal.runtime import tune_process
from shoal.shardcast.hashing import hash_root, hash_shards
from shoal.shardcast.layout import File, Layout
from shoal.shardcast.publish import SHARD_BYTES
from shoal.shardcast.source import scan_source
from shoal.tasks.source import open_tasks
from shoal.toploc.calibrate import Plan, calibrate_policy
from shoal.toploc.calibration import Calibration, hash_model
from shoal.toploc.prompts import Source
from shoal.toploc.variants import list_ways
from shoal.train import settle_config
from shoal.warmup import Note, load_start

_SKIPPED = {"1 slot", "replayed alone", "transformers, batch 1", "transformers, batch 7"}
"""Ways that take most of the time. In float32 thresholds are floors above the noise of all ways; `shoal calibrate`
measures every one, for a run whose strangers bring other machines."""


def write_start(config: RunConfig, folder: Path, note: Note) -> Policy:
    """The folder of v0, as the trainer will write it, and its policy as others will open it."""
    config = settle_config(config)
    tune_process(config.threads)
    with atomic_dir(folder) as target:
        save_policy(load_start(config, note), target)
    return open_policy(folder)


def calibrate_start(policy: Policy, config: RunConfig, *, chunks: int, tokens: int) -> Calibration:
    """What honest rollouts of v0 look like. In float32 it holds for all versions that follow."""
    room = policy.model.config.max_position_embeddings // 2
    source = Source(
        tokens=max(32, min(tokens, room)),
        temperature=config.engine.temperature,
        seed=config.seed,
        task=config.tasks.name,
        family=open_tasks(config) if config.tasks.set or config.length.mode != "none" else None,
    )
    plan = Plan(source=source, samples=chunks, threads=1)
    ways = [way for way in list_ways(config.policy.dtype, threads=1, mixed=False) if way.name not in _SKIPPED]
    return calibrate_policy(policy, ways, plan, lambda _: None, name=config.name)


def find_root(folder: Path) -> str:
    """The root under which the origin will publish these files: the trainer holds its v0 against it."""
    source = scan_source(folder)
    layout = Layout((File(name, stamp.size) for name, stamp in source.stamps.items()), SHARD_BYTES)
    hashes = [hash_shards(source.folder / shard.file, [shard])[0] for shard in layout.shards]
    return hash_root(layout.total, SHARD_BYTES, b"".join(hashes)).hex()


def describe_model(policy: Policy) -> str:
    """The hash of the model's configuration, as in the recipe."""
    return hash_model(policy.model)
