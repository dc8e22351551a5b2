"""The code verifier: unit tests of Python that a model wrote."""
