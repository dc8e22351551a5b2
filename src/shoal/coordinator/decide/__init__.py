"""Package shoal.coordinator.decide."""
