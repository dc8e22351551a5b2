"""Every attack on identity, wire, leases, submissions, queue, credit and ledger, and the tests that hold it off.

A row counts as held only by tests that exist, which is what the first test here looks at.
"""

import ast
import gc
import os
import re
from pathlib import Path

import pytest

from shoal.identity.authenticator import Authenticator, AuthLimits
from shoal.identity.keys import Key
from shoal.identity.nonces import NonceStore
from shoal.identity.proof_of_work import JoinRate, WorkGate
from shoal.identity.signatures import RawHeaders, RequestHead
from shoal.identity.signer import RequestSigner
from shoal.net.api_error import ApiError

HERE = Path(__file__).parent
NOW_MS = 1_800_000_000_000
THREATS = {
    "sybil": """
        coordinator/test_threats.py::test_a_thousand_identities_with_one_machine_earn_no_more_than_one
        coordinator/decide/test_leases.py::test_an_owner_on_probation_holds_few_leases_with_however_many_nodes
        coordinator/api/test_attacks.py::test_a_join_needs_its_own_stamp_of_work
        identity/test_proof_of_work.py::test_work_doubles_with_the_join_rate_and_falls_again
        identity/test_proof_of_work.py::test_cheap_challenges_cannot_be_hoarded
    """,
    "replay": """
        identity/test_authenticator_attacks.py::test_a_replay_is_refused_at_every_age
        identity/test_authenticator_attacks.py::test_a_request_dated_ahead_is_not_replayed_either
        identity/test_authenticator_attacks.py::test_a_replay_elsewhere_is_refused
        identity/test_authenticator_attacks.py::test_a_restart_lets_no_replay_in
        coordinator/api/test_attacks.py::test_a_request_counts_once_also_across_a_restart
    """,
    "signing oracle, cross-protocol": """
        identity/test_documents.py::test_no_signature_holds_under_another_tag
        identity/test_documents.py::test_a_request_is_no_document_and_a_document_no_request
        protocol/test_messages.py::test_a_signature_of_one_kind_holds_for_no_other
        ledger/test_event.py::test_a_statement_holds_for_its_run_kind_subject_and_body_alone
    """,
    "impersonated heartbeat": """
        identity/test_authenticator.py::test_the_identity_comes_from_the_signature_alone
        identity/test_authenticator.py::test_no_part_of_a_request_can_be_changed
        coordinator/api/test_attacks.py::test_each_forgery_is_refused_with_its_reason_and_reaches_nobody
    """,
    "forged or altered submission": """
        coordinator/api/test_attacks.py::test_an_upload_of_other_bytes_than_committed_leaves_no_blob
        coordinator/api/test_attacks.py::test_a_body_shorter_than_signed_is_never_used
        coordinator/decide/test_submissions.py::test_a_manifest_needs_the_signature_of_its_node
        coordinator/decide/test_submissions.py::test_nobody_submits_under_the_lease_of_another
        coordinator/decide/test_submissions.py::test_a_file_handed_in_for_other_groups_is_refused
        coordinator/blobs/test_stores.py::test_other_bytes_than_announced_leave_nothing
    """,
    "copying another's rollouts": """
        coordinator/decide/test_submissions.py::test_copied_rollouts_are_not_paid_and_the_first_is_not_punished
        coordinator/decide/test_submissions.py::test_who_announces_the_rollouts_of_another_in_advance_does_not_hurt_it
        coordinator/decide/test_submissions.py::test_who_names_the_file_of_another_must_show_that_it_has_it
        coordinator/test_threats.py::test_one_copied_sample_in_another_file_is_found
        coordinator/decide/test_verdicts.py::test_a_file_is_read_by_its_validator_and_the_trainer_alone
        coordinator/api/test_attacks.py::test_a_blob_is_for_those_the_coordinator_lets_read_it
    """,
    "resubmitting own old work": """
        coordinator/test_threats.py::test_own_old_work_with_other_metadata_is_not_paid_again
        coordinator/decide/test_submissions.py::test_rollouts_older_than_the_bound_are_refused
    """,
    "cherry-picking prompts or seeds": """
        coordinator/test_threats.py::test_who_returns_what_it_does_not_like_meets_it_again_and_gets_less
        coordinator/decide/test_leases.py::test_what_was_returned_meets_the_same_owner_again
        coordinator/decide/test_batches.py::test_beacons_are_those_of_the_chain_in_the_genesis
        coordinator/decide/test_verdicts.py::test_which_rollouts_are_checked_cannot_be_known_before
    """,
    "length denial of service": """
        coordinator/decide/test_submissions.py::test_a_manifest_that_no_file_could_fulfil_is_refused
        coordinator/decide/test_verdicts.py::test_a_verdict_must_fit_its_submission
    """,
    "crash the validator to be paid": """
        coordinator/decide/test_verdicts.py::test_a_file_that_crashes_two_checkers_is_bad_form_and_unpaid
        coordinator/decide/test_verdicts.py::test_what_kills_every_validator_is_unpaid_in_the_end_and_held_against_nobody
        coordinator/decide/test_verdicts.py::test_what_kills_the_only_validator_does_so_a_few_times_and_ends_by_time
        protocol/test_outcome.py::test_hard_takes_two_and_crashes_are_never_paid
    """,
    "path traversal, object overwrite": """
        coordinator/api/test_attacks.py::test_no_part_of_a_path_has_a_second_spelling_or_leads_anywhere
        coordinator/blobs/test_disk.py::test_nothing_but_a_hash_is_a_name
        coordinator/blobs/test_stores.py::test_a_name_that_is_no_hash_reaches_nothing
        coordinator/blobs/test_stores.py::test_two_uploads_of_one_blob_at_once_make_one_blob
    """,
    "slowloris, slow body, idle sockets": """
        coordinator/api/test_attacks.py::test_signed_heartbeats_go_on_while_two_thousand_sockets_dribble
        net/test_server.py::test_two_thousand_dribbling_sockets_do_not_keep_an_honest_caller_waiting
        net/test_server.py::test_a_head_that_drips_is_cut_however_often_a_byte_comes
        net/test_server.py::test_a_body_slower_than_the_least_rate_is_cut_with_408
        net/test_server.py::test_one_address_has_its_own_limit_of_connections
    """,
    "signature-check flood": """
        identity/test_authenticator_attacks.py::test_cheap_checks_come_before_expensive_ones
        identity/test_authenticator_attacks.py::test_one_address_gets_few_signatures_looked_at
        identity/test_authenticator_attacks.py::test_a_flood_from_many_addresses_leaves_room_for_those_that_were_here_before
        identity/test_authenticator_attacks.py::test_forgeries_do_not_use_up_the_rate_of_the_one_they_name
        coordinator/api/test_attacks.py::test_a_body_is_not_read_from_who_is_refused
    """,
    "memory and label growth": """
        test_threats.py::test_memory_is_flat_under_a_million_distinct_forged_ids
        identity/test_authenticator_attacks.py::test_memory_is_flat_under_distinct_forged_ids
        identity/test_authenticator_attacks.py::test_tables_keep_their_size_under_any_number_of_addresses_and_owners
        coordinator/api/test_attacks.py::test_distinct_forged_ids_leave_nothing_behind
        identity/test_nonces.py::test_a_full_book_refuses_rather_than_forgets
        protocol/test_messages.py::test_a_reported_rate_is_a_bounded_integer
        coordinator/test_status.py::test_nodes_that_report_most_displace_nobody_from_status
    """,
    "withheld work, hoarding leases": """
        coordinator/test_threats.py::test_who_never_answers_holds_less_each_time_and_stops_nobody
        coordinator/decide/test_leases.py::test_a_lease_ends_at_its_deadline_and_not_before
        coordinator/decide/test_leases.py::test_a_backup_is_given_when_nothing_else_is_to_do_and_a_lease_is_slow
        coordinator/decide/test_submissions.py::test_a_node_that_never_uploads_holds_up_nobody_for_ever
    """,
    "lease timeout games": """
        coordinator/decide/test_leases.py::test_of_two_holders_exactly_one_is_paid
        coordinator/decide/test_submissions.py::test_within_the_grace_two_holders_race_and_one_delivers
        coordinator/decide/test_submissions.py::test_a_late_submission_is_refused_if_somebody_else_holds_the_groups
    """,
    "validator or coordinator crash": """
        coordinator/test_crash_points.py::test_kills_at_every_point_lose_nothing_and_pay_nothing_twice
        ledger/test_crash.py::test_a_killed_writer_loses_nothing_it_answered_and_leaves_nothing_half
        coordinator/test_service.py::test_kill_minus_nine_in_the_middle_of_an_upload_costs_a_retry_and_nothing_else
        coordinator/decide/test_verdicts.py::test_a_validator_keeps_its_claim_until_it_judges_or_is_late
        coordinator/decide/test_membership.py::test_an_outage_moves_uploads_claims_and_opinions
    """,
    "flooding so that checks lapse": """
        coordinator/test_threats.py::test_ten_times_more_work_than_can_be_judged_is_judged_all_the_same
        coordinator/decide/test_leases.py::test_no_leases_while_the_queue_is_full
        coordinator/decide/test_leases.py::test_no_leases_for_an_owner_with_too_much_in_the_queue
        coordinator/decide/test_verdicts.py::test_owners_take_turns_in_the_queue
    """,
    "lazy or bribed validator": """
        coordinator/decide/test_verdicts.py::test_a_validator_that_claims_and_never_judges_sinks_nothing_and_loses_its_standing
        coordinator/decide/test_verdicts.py::test_who_let_a_claim_lapse_is_given_other_work_first
        coordinator/decide/test_verdicts.py::test_one_hard_verdict_is_not_enough
        coordinator/decide/test_verdicts.py::test_nobody_judges_the_work_of_its_own_owner
        coordinator/decide/test_canaries.py::test_nothing_anywhere_differs_between_a_canary_and_an_honest_newcomer
        coordinator/decide/test_canaries.py::test_who_accepts_a_canary_is_found_and_its_work_is_not_trained_on
        coordinator/decide/test_canaries.py::test_who_accepts_a_canary_loses_its_bond_to_nobody
        coordinator/decide/test_canaries.py::test_every_opinion_on_a_canary_is_graded_whatever_came_of_it
    """,
    "punishment silently off": """
        coordinator/decide/test_canaries.py::test_silence_of_the_canaries_is_an_alarm
    """,
    "ban evasion": """
        coordinator/test_state_machine.py::test_anything_in_any_order_keeps_the_rules_and_can_be_finished
        coordinator/test_standing_machine.py::test_only_an_unban_leads_from_banned_to_paid
        coordinator/decide/test_credit.py::test_a_ban_ends_all_that_an_owner_has_begun
        coordinator/decide/test_credit.py::test_a_banned_owner_cannot_join_with_another_node
        coordinator/api/test_attacks.py::test_a_banned_node_is_refused_on_every_route_that_knows_its_caller
        coordinator/rules/test_standing.py::test_no_outcome_lifts_a_ban
    """,
    "exit before detection": """
        coordinator/decide/test_credit.py::test_a_bond_on_its_way_back_is_still_taken
    """,
    "coordinator rewrites history": """
        audit/test_verify.py::test_a_change_of_any_column_of_any_row_is_found
        audit/test_verify.py::test_events_that_were_written_anew_do_not_give_the_signed_heads
        audit/test_verify.py::test_a_ledger_that_was_cut_off_is_found_by_who_holds_a_later_head
        audit/test_forged_credit.py::test_credit_that_the_coordinator_invents_is_named
        audit/test_forged_work.py::test_work_that_the_coordinator_invents_is_named
        audit/test_decisions.py::test_no_decision_makes_an_event_that_is_a_little_different
        audit/test_tampering.py::test_every_edited_added_or_removed_row_is_found
        node/test_client.py::test_a_fork_stops_the_node_for_good_and_the_evidence_is_kept
        node/test_client.py::test_a_proof_that_was_altered_on_the_way_is_asked_for_again
    """,
    "malicious coordinator": """
        node/test_client.py::test_a_lease_that_is_not_signed_as_it_was_sent_is_not_worked_for
        node/test_client.py::test_a_redirect_is_no_answer_and_never_followed
        node/test_client.py::test_work_without_measure_is_not_done
        node/test_client.py::test_a_server_that_stalls_or_talks_nonsense_is_given_up
    """,
    "clock skew": """
        identity/test_authenticator.py::test_a_clock_that_is_off_a_little_is_fine
        identity/test_authenticator.py::test_a_wrong_clock_is_reported_with_its_offset_and_corrected_once
        node/test_client.py::test_a_wrong_clock_is_corrected_once_and_without_a_wait
    """,
    "stolen node key": """
        coordinator/decide/test_membership.py::test_a_revoked_node_is_out_for_good
        coordinator/decide/test_membership.py::test_a_node_whose_delegation_ended_gets_nothing
        identity/test_authenticator_attacks.py::test_a_revoked_node_is_out_with_the_next_request
    """,
    "double redeem, double pay": """
        coordinator/decide/test_credit.py::test_of_a_hundred_parallel_requests_to_redeem_as_many_as_there_is_credit_for_are_paid
        coordinator/decide/test_credit.py::test_a_request_to_redeem_counts_once_and_is_its_owners
        coordinator/decide/test_verdicts.py::test_an_accepted_submission_is_paid_once_by_its_tokens
        ledger/test_ledger.py::test_a_hundred_parallel_payments_of_one_balance_pay_it_out_once
    """,
}


@pytest.mark.parametrize("threat", THREATS)
def test_every_threat_has_tests_that_exist(threat: str) -> None:
    rows = THREATS[threat].split()
    assert rows
    for row in rows:
        path, _, name = row.partition("::")
        tree = ast.parse((HERE / path).read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in names, f"{row} is gone"


class CheapAuthenticator(Authenticator):
    """A door whose requests are parsed once and differ in their id: the rest of the checks is what can grow."""

    head: RequestHead

    def _read_head(
        self, method: str, target: str, headers: RawHeaders, now_ms: int, max_body_bytes: int | None
    ) -> RequestHead:
        return self.head._replace(node=target)


def test_memory_is_flat_under_a_million_distinct_forged_ids(tmp_path: Path) -> None:
    key, server = Key.generate(), Key.generate()
    book = NonceStore(tmp_path / "nonces.db")
    gate = WorkGate(b"s" * 32, "run-1", JoinRate())
    limits = AuthLimits(address_rate=1e6, fresh_rate=1e6, max_tracked=4096)
    known: dict[str, None] = {}
    door = CheapAuthenticator(
        run="run-1", audience=server.public, find_member=known.get, nonces=book, gate=gate, limits=limits
    )
    signer = RequestSigner(key, "run-1", server.public, clock_ms=lambda: NOW_MS)
    raw = [(name.encode(), value.encode()) for name, value in signer.sign_request("POST", "/v1/a", b"x")]
    door.head = Authenticator._read_head(door, "POST", "/v1/a", raw, NOW_MS, None)
    codes: dict[str, int] = {}

    def flood(first: int, count: int) -> None:
        for number in range(first, first + count):
            node, address = f"{number:064x}", f"address {number}"
            check = door.check_join if number & 1 else door.check_head
            try:
                check("POST", node, [], address, NOW_MS + number // 100)
            except ApiError as error:
                codes[error.code] = codes.get(error.code, 0) + 1

    flood(0, 20_000)
    gc.collect()
    before = read_memory()
    flood(20_000, 980_000)
    gc.collect()
    grown = read_memory() - before
    assert sum(codes.values()) == 1_000_000 and len(codes) == 2, codes
    assert door.num_tracked <= 3 * limits.max_tracked + 1
    assert len(book) == 0
    assert grown < 4 << 20, f"{grown} bytes more after a million ids"
    book.close()


def read_memory() -> int:
    """Bytes of this process that are in memory."""
    pages = int(re.split(r"\s+", Path("/proc/self/statm").read_text())[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
