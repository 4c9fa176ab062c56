"""The package's version: part of every group fingerprint, so ranks with different ones refuse each other."""

__version__ = "0.1.0"
