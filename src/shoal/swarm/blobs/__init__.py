"""Where submissions lie: files named by their SHA-256."""
