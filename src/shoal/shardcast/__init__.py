"""Weights to the whole swarm: signed manifests, shards that anyone may pass on, lossless deltas."""
