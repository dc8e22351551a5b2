"""A box for work that nobody trusts: a fresh, walled, limited process for each piece of it.

    warden (here) -> zygote (imported everything, lives in an empty file system) -> cell (one piece of work, then gone)

What is imported inside is this package and the standard library: a process with threads, which numpy brings along,
cannot take a namespace of users, and all that a zygote holds is copied for every cell.
"""
