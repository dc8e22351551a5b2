"""A whole swarm on one machine: made ready, started, watched, stopped, reported on."""
