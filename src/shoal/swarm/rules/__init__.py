"""What is decided, as pure functions: no clock, no database, no randomness. Each page is tested by its properties."""
