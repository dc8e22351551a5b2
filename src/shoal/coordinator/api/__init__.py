"""The control plane over HTTP: routes, access rules, and answers."""
