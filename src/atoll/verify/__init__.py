"""Verification of what is loaded: signatures, root and snapshot of a shared run, and files against their hashes.

Everything that opens a network uses this package. Roles, admission and leases are above it, in `atoll.apps.share`.
"""
