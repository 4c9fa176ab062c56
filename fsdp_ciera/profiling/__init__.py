"""Measures training from outside: how often weights change, and where the time of a step goes."""
