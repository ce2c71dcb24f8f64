"""Shared foundations: configuration, artifacts, paths of a run, errors, checks. Only `device` imports torch."""
