"""The command line, `ciera`."""
