"""The simulator: where the measuring stand ends, a model of it goes on, with its own error stated.

runs.py       what the stand measured and recorded: settings, medians, traces
modelled.py   a trace of a model that nobody ran, from `ciera plan`'s shapes and rates
schemes.py    how every contender's step follows from a stock step
place.py      a trace moved to other ranks: what grows, what shrinks; ranks that share cores
network.py    seconds of ring collectives by bytes, hops and calls; a throttled link's token bucket
graph.py      a trace as nodes with dependencies on streams, serial or overlapped
engine.py     when each node starts and ends
calibrate.py  the constants of network and contention, by least squares from measured traces
fit.py        that least squares: no coefficient below zero, outliers count less
validate.py   predicted beside measured iteration times, and the bar
project.py    all contenders over many world sizes
report.py     tables and JSON

The command is cli/tasks/simulate.py; timeline and projection pictures are in cli/figures/simulate.py.
"""
