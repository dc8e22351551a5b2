"""Commands of `shoal` beside those of a single run: flags and printing, the work is done elsewhere."""
