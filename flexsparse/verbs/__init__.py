"""Verbs of the command line, a file each."""
