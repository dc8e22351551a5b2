"""What servers have in common."""
