"""The trainer of a swarm: takes batches, trains, publishes versions. Also the evaluator."""
