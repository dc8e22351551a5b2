"""What is measured inside the roles: which calls are which stage, and where the numbers are put.

Every process has a file of doubles, named by its process id: CPU seconds and calls of each stage, then the counters.
Only what Python itself brings is imported here: this module is part of the start of every process.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the way from a prompt to a gradient."""

    name: str
    targets: tuple[str, ...]
    """functions, methods and coroutines, `module:name`; what another stage does inside of them is that one's"""
    is_model: bool = False
    """whether it is what a single process without a swarm would compute as well"""


STAGES = (
    Stage("generate", ("shoal.engine.torch:TorchEngine.submit", "shoal.engine.torch:TorchEngine.step"), is_model=True),
    Stage("prove", ("shoal.toploc.stream:ProofBuilder.__call__", "shoal.toploc.stream:ProofBuilder.take_many")),
    Stage("plan", ("shoal.group:plan_groups",)),
    Stage("score", ("shoal.group:score_group",)),
    Stage("write", ("shoal.worker.outbox:Outbox.pack",)),
    Stage(
        "orders",
        (
            "shoal.worker.outbox:Outbox.find_key",
            "shoal.worker.outbox:Outbox.add_lease",
            "shoal.worker.outbox:Outbox.forget",
        ),
    ),
    Stage("lease", ("shoal.swarm.client:NodeClient.ask_lease",)),
    Stage("commit", ("shoal.swarm.client:NodeClient.commit",)),
    Stage("upload", ("shoal.swarm.client:NodeClient.upload",)),
    Stage("heartbeat", ("shoal.node.session:Session._beat",)),
    Stage("claim", ("shoal.swarm.client:NodeClient.claim_jobs",)),
    Stage("fetch", ("shoal.swarm.client:NodeClient.fetch_blob",)),
    Stage("form", ("shoal.submission.read:read_submission", "shoal.trainer.reading:JailReader.__call__")),
    Stage("meaning", ("shoal.validator.judge:Judge._find_meaning",)),
    Stage("proof", ("shoal.validator.proof:check_proofs",)),
    Stage("prefill", ("shoal.toploc.replay:replay_batches",), is_model=True),
    Stage("verdict", ("shoal.swarm.client:NodeClient.send_verdict",)),
    Stage("read batch", ("shoal.trainer.batch:BatchReader.read_batch",)),
    Stage("old log-probs", ("shoal.learner.learner:Learner._score_old",), is_model=True),
    Stage("train", ("shoal.learner.learner:Learner.train_step",), is_model=True),
    Stage("write version", ("shoal.trainer.versions:Versions.write",)),
    Stage("record", ("shoal.trainer.loop:Trainer._record",)),
    Stage("checkpoint", ("shoal.trainer.loop:Trainer._save",)),
    Stage(
        "publish",
        (
            "shoal.trainer.publish:Publisher._publish",
            "shoal.trainer.publish:Publisher._prune_now",
            "shoal.trainer.versions:Versions.record",
            "shoal.trainer.versions:Versions.hash_weights",
        ),
    ),
    Stage("load", ("shoal.policy.model:open_policy", "shoal.engine.torch:TorchEngine.swap_weights")),
)
COUNTERS = ("rollouts", "tokens", "file_bytes", "received_bytes", "sent_bytes")
NUM_DOUBLES = 2 * len(STAGES) + len(COUNTERS)
FOLDER = "SHOAL_LOOP_PROBE"
"""name of the variable with the folder of the files"""
