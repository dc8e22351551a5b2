"""The red team: workers that cheat, one small file for each way, to show that it does not pay."""
