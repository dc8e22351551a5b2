"""Package shoal.ledger."""
