"""What all roles that talk to a coordinator share: the session with it, named waits, spans, tasks that end together."""
