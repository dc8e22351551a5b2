"""Validators that lie, one file per lie: nodes like any other in all but what they find."""
