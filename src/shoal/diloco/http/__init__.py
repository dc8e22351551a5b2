"""The engine for strangers: peers call a reducer over HTTP, outbound only, and every request and outcome is signed.

The reducer's side is `service` (files and server), `app` (routes), `reducer` (decisions), `open_round`, `roll`,
`weight` (rules without a clock of their own), `shelf` and `chain` (disk), `rebuild`. The peer's side is `client`
(requests) and `averager` (the engine's face). `messages` is what both speak.
"""
