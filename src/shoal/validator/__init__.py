"""The validator: reports what it finds in a submission, with numbers. It does not decide pay."""
