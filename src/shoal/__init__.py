"""shoal: reinforcement learning of language models on machines nobody has to trust."""

__version__ = "0.1.0"
