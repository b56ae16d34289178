"""The version, also part of what makes a job the same job."""

__version__ = "0.1.0"
