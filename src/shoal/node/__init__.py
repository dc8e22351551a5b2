"""Shared by all roles that talk to a coordinator: session, signed client, recipe, weights, file transfer."""
