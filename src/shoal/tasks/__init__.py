"""Tasks: families of problems with demonstrations and verifiers, and the split into training and held-out tasks."""
