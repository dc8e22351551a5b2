"""The red team: attacks by workers, validators and clients, to show that they are caught or do not pay."""
