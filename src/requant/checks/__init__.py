"""Proving what was done: is a checkpoint whole, and how far are two of them apart."""
