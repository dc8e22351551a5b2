"""One file per attack. Each replaces as little of an honest worker as it can: the rest stays as it is."""
