"""The HTTP server of origins and relays."""
