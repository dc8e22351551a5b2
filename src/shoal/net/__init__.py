"""HTTP server, HTTP client, retries and limits, shared by all roles."""
