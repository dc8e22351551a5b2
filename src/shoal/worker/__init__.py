"""The worker: takes leases, writes rollouts with their proofs, hands them in. It runs data, never code, of others."""
