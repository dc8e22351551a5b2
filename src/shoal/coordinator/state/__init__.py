"""The state of a run: tables that follow from the events alone.

Invariant: these tables are written here and nowhere else, so `shoal ledger verify` can rebuild and compare them.

All of them are one projection, because an event may concern several: a receipt concerns a submission, its range of
groups and the queue. An event's body contains the parameters that it needs, so changing the parameters does not change
the past.
"""

from sqlalchemy import Table

from shoal.coordinator.state import (
    canaries,
    credit,
    drift,
    leases,
    members,
    queue,
    run,
    storage,
    submissions,
    suspicion,
    validators,
)
from shoal.ledger.db import Handler, Projection
from shoal.ledger.event import EventKind

HANDLERS: dict[str, tuple[Handler, ...]] = {
    EventKind.GENESIS: (run.begin_run,),
    EventKind.PARAMS: (run.note_command, run.change_params, credit.grade_holds),
    EventKind.ADMIN: (run.note_command, run.switch_run),
    EventKind.COORDINATOR_UP: (run.note_outage, leases.shift_deadlines, submissions.shift_uploads, queue.shift_claims),
    EventKind.NODE_JOIN: (members.add_node,),
    EventKind.NODE_DELEGATE: (members.add_node,),
    EventKind.NODE_REVOKE: (members.drop_node,),
    EventKind.NODE_LEAVE: (members.drop_node,),
    EventKind.NODE_STANDING: (members.set_standing, validators.ease_silence),
    EventKind.NODE_WATCH: (drift.set_watch,),
    EventKind.BAN: (run.note_command, members.add_ban, credit.freeze_credit, suspicion.drop_suspicion),
    EventKind.UNBAN: (
        run.note_command,
        members.lift_ban,
        credit.thaw_credit,
        validators.forgive_validator,
        suspicion.drop_suspicion,
    ),
    EventKind.STEP_OPEN: (run.open_step,),
    EventKind.LEASE_GRANT: (
        run.take_indices,
        leases.lease_range,
        leases.add_lease,
        leases.note_grant,
        storage.reserve_file,
    ),
    EventKind.LEASE_EXTEND: (leases.extend_lease,),
    EventKind.LEASE_END: (
        leases.end_lease,
        submissions.drop_submission,
        queue.unblock_jobs,
        leases.release_range,
        leases.set_spacing,
        members.set_lease_limit,
        members.count_failure,
        storage.release_file,
    ),
    EventKind.SUB_COMMIT: (storage.retake_room, submissions.add_submission),
    EventKind.SUB_RECEIPT: (submissions.receive_submission, leases.deliver_range, run.note_delivery, queue.queue_job),
    EventKind.VAL_CLAIM: (queue.claim_job,),
    EventKind.VAL_VERDICT: (suspicion.weigh_odds, queue.add_verdict, members.end_lapses, validators.note_verdict_time),
    EventKind.VAL_LAPSE: (members.count_lapse, queue.lapse_claim),
    EventKind.VAL_DOUBT: (validators.add_opinion_need,),
    EventKind.VAL_GRADE: (validators.add_grades,),
    EventKind.SUB_OUTCOME: (
        storage.settle_file,
        submissions.decide_submission,
        leases.settle_range,
        leases.set_spacing,
        leases.note_duration,
        queue.finish_job,
        queue.unblock_jobs,
        validators.note_single_verdict,
        validators.note_silence,
        drift.note_numbers,
        members.count_outcome,
        members.set_lease_limit,
        credit.add_holds,
        credit.end_appeal,
    ),
    EventKind.BATCH_CUT: (run.cut_step, leases.mark_batch, drift.weigh_step),
    EventKind.VERSION_PUBLISH: (run.add_version,),
    EventKind.BLOB_DROP: (storage.drop_room, submissions.drop_blobs),
    EventKind.CREDIT_POST: (credit.release_holds,),
    EventKind.STAKE_UNBOND: (credit.move_bond,),
    EventKind.SLASH: (credit.burn_credit,),
    EventKind.APPEAL: (queue.reopen_job, credit.add_appeal),
    EventKind.CANARY_SEAL: (run.note_command, canaries.add_seals),
    EventKind.CANARY_REVEAL: (run.note_command, canaries.open_seal, credit.burn_canary),
    EventKind.CANARY_GRADE: (canaries.add_grade,),
    EventKind.REDEEM_REQUEST: (credit.add_redeem,),
    EventKind.REDEEM_DONE: (run.note_command, credit.end_redeem),
    EventKind.REDEEM_FAILED: (run.note_command, credit.end_redeem),
}

_MODULES = (run, members, leases, submissions, storage, queue, validators, drift, suspicion, credit, canaries)
TABLES = tuple(value for module in _MODULES for value in vars(module).values() if isinstance(value, Table))
VERSION = 8
"""Increase it when a table or a handler changes: `ledger.schema` then rebuilds the tables at start."""
PROJECTIONS = (Projection("state", TABLES, HANDLERS, VERSION),)
