"""Isolated processes for work on untrusted input: code and expressions written by a model, files from other machines.

    caller -> pool -> fork server (has imported everything, lives in an empty file system) -> one process per job

A job runs a program, named by its module. A process with threads cannot create a user namespace, and every job copies
the memory of its fork server. Therefore programs import little, and this package only the standard library.
"""
