"""Looking on: how often weights change in training, and where the time of a step goes."""
