"""What is measured inside the roles: which calls belong to which stage, and where the numbers are stored.

Every process has a file of doubles, named after its process id: CPU seconds and calls of each stage, then the counters.
Only the standard library is imported here, because every process imports this module at its start.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the path from a prompt to a gradient."""

    name: str
    targets: tuple[str, ...]
    """functions, methods and coroutines, `module:name`; time of a nested stage counts for that stage only"""
    is_model: bool = False
    """whether a single process without a swarm would compute it as well"""


STAGES = (
    Stage("generate", ("shoal.engine.torch:TorchEngine.submit", "shoal.engine.torch:TorchEngine.step"), is_model=True),
    Stage("prove", ("shoal.toploc.build:ProofBuilder.__call__", "shoal.toploc.build:ProofBuilder.take_many")),
    Stage("plan", ("shoal.group:plan_groups",)),
    Stage("score", ("shoal.group:score_group",)),
    Stage("write", ("shoal.worker.behaviour:pack_work",)),
    Stage(
        "orders",
        (
            "shoal.worker.leases:LeaseTable.find_key",
            "shoal.worker.leases:LeaseTable.hold",
            "shoal.worker.leases:LeaseTable.end",
        ),
    ),
    Stage("lease", ("shoal.node.client:NodeClient.ask_lease",)),
    Stage("commit", ("shoal.node.client:NodeClient.commit",)),
    Stage("upload", ("shoal.node.client:NodeClient.upload",)),
    Stage("heartbeat", ("shoal.node.session:Session._heartbeat",)),
    Stage("claim", ("shoal.node.client:NodeClient.claim_jobs",)),
    Stage("fetch", ("shoal.node.client:NodeClient.fetch_blob",)),
    Stage("form", ("shoal.submission.read:read_submission", "shoal.trainer.batch:read_sandboxed")),
    Stage("meaning", ("shoal.validator.judge:Judge._check_consistency",)),
    Stage("proof", ("shoal.validator.proof:check_proofs",)),
    Stage("prefill", ("shoal.toploc.replay:replay_batches",), is_model=True),
    Stage("verdict", ("shoal.node.client:NodeClient.send_verdict",)),
    Stage("read batch", ("shoal.trainer.batch:BatchReader.read_batch",)),
    Stage("old log-probs", ("shoal.learner.learner:Learner._score_old",), is_model=True),
    Stage("train", ("shoal.learner.learner:Learner.train_step",), is_model=True),
    Stage("write version", ("shoal.trainer.versions:Versions.write",)),
    Stage("record", ("shoal.trainer.trainer:Trainer._record",)),
    Stage("checkpoint", ("shoal.trainer.trainer:Trainer._save",)),
    Stage(
        "publish",
        (
            "shoal.trainer.publish:Publisher._publish",
            "shoal.trainer.versions:Versions.prune",
            "shoal.trainer.versions:Versions.record",
        ),
    ),
    Stage("load", ("shoal.policy.model:open_policy", "shoal.engine.torch:TorchEngine.swap_weights")),
)
COUNTERS = ("rollouts", "tokens", "file_bytes", "received_bytes", "sent_bytes")
NUM_DOUBLES = 2 * len(STAGES) + len(COUNTERS)
FOLDER = "SHOAL_LOOP_PROBE"
"""environment variable with the folder of the files"""
