"""Package shoal.redteam.behaviours."""
