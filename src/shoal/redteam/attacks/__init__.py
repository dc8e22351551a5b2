"""The attacks, one module per family. Each attack replaces as little of an honest worker as possible."""
