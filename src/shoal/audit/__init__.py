"""Audit of a ledger: it must contain exactly what the coordinator's own decision functions produce.

A ledger is a sequence of decisions. The first event of each states its input: a manifest that a node signed, a lease
that a node requested, a deadline that passed. The audit runs the decision again, with the coordinator's functions, on
tables built from the preceding events. Every event that the decision appends must equal the next event of the ledger:
kind, actor, signature, subject, body, postings, time. No rule is implemented twice, so a rule change needs one edit.
"""
