"""Package shoal.calibrate."""
