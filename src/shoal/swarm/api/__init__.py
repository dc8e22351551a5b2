"""The control plane over HTTP: routes, who may use them, and what they answer."""
