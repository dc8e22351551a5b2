"""The file that a worker submits for a lease: how it is written, and how an untrusted one is read."""
