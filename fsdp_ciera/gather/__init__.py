"""One gather: the runs of a parameter group's buffer, the ranks' agreement, the exchange of payloads, and its checks."""
