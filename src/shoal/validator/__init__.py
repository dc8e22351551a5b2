"""The validator: says of a submission what was found, with numbers, and pays nobody itself."""
