"""Executing a plan: scan, tiles on threads, journal, commit."""
