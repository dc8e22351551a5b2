"""Task sets: problems from files and generators, under one content hash."""
