"""The state of a run: tables that follow from the events alone.

Invariant: these tables are written here and nowhere else, so `shoal ledger verify` can make them again and compare.

All of them are one projection, because events of one kind concern several: a receipt is about a submission, its span
and the queue. What an event needs of the parameters stands in its body, so a change of rules does not change the past.
"""

from collections.abc import Callable

from sqlalchemy import Connection

from shoal.swarm.event import Event, Kind
from shoal.swarm.projection import Projection
from shoal.swarm.state import (
    canaries,
    credit,
    history,
    judges,
    leases,
    nodes,
    queue,
    redeems,
    run,
    spans,
    steps,
    submissions,
    verdicts,
)

Handler = Callable[[Event, Connection], None]

HANDLERS: dict[str, tuple[Handler, ...]] = {
    Kind.GENESIS: (run.begin_run,),
    Kind.PARAMS: (run.note_command, run.change_params, credit.grade_holds),
    Kind.ADMIN: (run.note_command, run.switch_run),
    Kind.COORDINATOR_UP: (run.note_outage, leases.shift_deadlines, submissions.shift_uploads, queue.shift_claims),
    Kind.NODE_JOIN: (nodes.add_node,),
    Kind.NODE_DELEGATE: (nodes.add_node,),
    Kind.NODE_REVOKE: (nodes.drop_node,),
    Kind.NODE_LEAVE: (nodes.drop_node,),
    Kind.NODE_STANDING: (nodes.set_standing, judges.ease_silence),
    Kind.NODE_WATCH: (history.set_watch,),
    Kind.BAN: (run.note_command, nodes.add_ban, credit.freeze_credit),
    Kind.UNBAN: (run.note_command, nodes.lift_ban, credit.thaw_credit, judges.forgive_judge),
    Kind.STEP_OPEN: (steps.open_step,),
    Kind.LEASE_GRANT: (steps.take_indices, spans.lease_span, leases.add_lease),
    Kind.LEASE_END: (
        leases.end_lease,
        submissions.drop_submission,
        queue.unblock_jobs,
        spans.release_span,
        nodes.set_width,
        nodes.count_failure,
    ),
    Kind.SUB_COMMIT: (submissions.add_submission,),
    Kind.SUB_RECEIPT: (submissions.receive_submission, spans.deliver_span, steps.note_delivery, queue.queue_job),
    Kind.VAL_CLAIM: (queue.claim_job,),
    Kind.VAL_VERDICT: (queue.add_verdict, nodes.end_lapses, judges.hear_judge),
    Kind.VAL_LAPSE: (nodes.count_lapse, queue.lapse_claim),
    Kind.VAL_DOUBT: (judges.add_doubt,),
    Kind.VAL_GRADE: (judges.add_grades,),
    Kind.SUB_OUTCOME: (
        submissions.decide_submission,
        spans.settle_span,
        queue.finish_job,
        queue.unblock_jobs,
        judges.note_spared,
        judges.note_silence,
        history.note_numbers,
        nodes.count_outcome,
        nodes.set_width,
        credit.add_holds,
        credit.end_appeal,
    ),
    Kind.BATCH_CUT: (steps.cut_step, spans.mark_batch, history.weigh_step),
    Kind.VERSION_PUBLISH: (steps.add_version,),
    Kind.BLOB_DROP: (submissions.drop_blobs,),
    Kind.CREDIT_POST: (credit.release_holds,),
    Kind.STAKE_UNBOND: (credit.move_bond,),
    Kind.SLASH: (credit.burn_credit,),
    Kind.APPEAL: (queue.reopen_job, credit.add_appeal),
    Kind.CANARY_SEAL: (run.note_command, canaries.add_seals),
    Kind.CANARY_REVEAL: (run.note_command, canaries.open_seal, credit.burn_canary),
    Kind.CANARY_GRADE: (canaries.add_grade,),
    Kind.REDEEM_REQUEST: (redeems.add_redeem,),
    Kind.REDEEM_DONE: (run.note_command, redeems.end_redeem),
    Kind.REDEEM_FAILED: (run.note_command, redeems.end_redeem),
}

TABLES = (
    run.RUN_STATE,
    run.COMMAND,
    run.OUTAGE,
    nodes.OWNER,
    nodes.NODE,
    nodes.BAN,
    steps.STEP,
    steps.VERSION,
    spans.SPAN,
    spans.GROUP,
    leases.LEASE,
    submissions.SUBMISSION,
    submissions.ROLLOUT,
    submissions.DUPLICATE,
    queue.JOB,
    queue.SERVED,
    verdicts.VERDICT,
    queue.LAPSE,
    judges.DOUBT,
    judges.JUDGE,
    judges.GRADE,
    history.NUMBERS,
    history.BAG,
    history.HISTORY,
    credit.HOLD,
    credit.BOND,
    credit.LOSS,
    credit.APPEAL,
    canaries.SEAL,
    canaries.CANARY,
    redeems.REDEEM,
)


def apply_state(event: Event, connection: Connection) -> None:
    """Bring all tables up to date with one more event."""
    for handle in HANDLERS.get(event.kind, ()):
        handle(event, connection)


PROJECTIONS = (Projection("state", TABLES, apply_state),)
