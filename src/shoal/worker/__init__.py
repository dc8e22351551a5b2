"""The worker: takes leases, generates rollouts with proofs, submits them. It never runs code from others, only data."""
