"""One gather: the runs of a group's buffer, what all ranks agree on, payloads on their way, and their checks."""
