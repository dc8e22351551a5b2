"""The trainer of a swarm: takes batches, trains, publishes versions; and the evaluator and origin beside it."""
