"""The simulator: a model that predicts what the measuring stand cannot measure, and states its own error.

runs.py       the runs that the stand measured: settings, medians, traces
modelled.py   a trace of a model that nobody ran, from `ciera plan`'s shapes and rates
schemes.py    derives every contender's step from a stock step
place.py      moves a trace to other ranks: what grows, what shrinks; ranks that share cores
network.py    seconds of ring collectives by bytes, hops and calls; a throttled link's token bucket
graph.py      a trace as nodes with dependencies on streams, serial or overlapped
engine.py     computes when each node starts and ends
calibrate.py  the constants of network and contention, by least squares from measured traces
fit.py        the least squares for that: no coefficient below zero, outliers count less
validate.py   predicted beside measured iteration times, and the bar
project.py    projects all contenders to many world sizes
report.py     tables and JSON

The command is cli/tasks/simulate.py; timeline and projection pictures are in cli/figures/simulate.py.
"""
