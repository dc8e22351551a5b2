"""Package shoal.tasks.families."""
