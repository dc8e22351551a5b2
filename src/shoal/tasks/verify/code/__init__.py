"""The verifier of code: unit tests of Python that a model wrote."""
