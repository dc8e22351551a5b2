"""The law of a ledger: it says what the coordinator's own decisions make of it, and nothing else.

A ledger is read as the minutes of decisions. Of each decision the first event says what was decided about: a manifest
that a node signed, a lease that somebody asked for, a deadline that had passed. The decision is taken again, by the
functions that the coordinator runs, on tables that were made from the events before; and whatever it appends must be
what the ledger has next, to the letter: kind, actor, signature, subject, body, postings, time. So no rule is written
down here a second time, and a change of the rules needs one edit.
"""
