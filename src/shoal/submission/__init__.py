"""The file that a worker hands in for a lease: how it is written, and how a stranger's is read."""
