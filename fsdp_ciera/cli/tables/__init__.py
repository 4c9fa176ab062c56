"""Figures as tables of rich, on a console and nowhere else: one file for each command, and library.py for plans, counts and
estimates."""
