"""The control plane of a run: identity, ledger, leases, submissions, credit."""
