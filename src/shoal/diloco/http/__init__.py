"""The engine for untrusted peers: they call a reducer over HTTP, outbound only, and every request and outcome is
signed.

The reducer's side is `service` (files and server), `app` (routes), `reducer` (decisions), `open_round` and `membership`
(rules without their own clock), `snapshots` and `round_log` (disk) and `state_recovery`. The peer's side is `client`
(requests) and `averager` (the engine's interface). `messages` defines what both exchange.
"""
