"""The measuring stand: the same job by stock FSDP2, its rivals and every setting of ours, over real links, in one run.

command.py, e2e.py       `ciera bench e2e`: prepare, measure, report
netns.py, local.py       hosts on one machine: namespaces with throttled links, or plain processes (ranks.py: both)
job.py                   what is trained
contenders.py            who trains it, by key; peers.py, zero3.py: rivals that are not ours
rank.py                  one rank: its turns, timed by profiling.instruments, with a reduce-scatter of its own (ring.py)
run.py                   rounds A B C, A B C over all hosts -> results.py, with machine.py's names
report.py, ablation.py, figures.py, compare.py   tables, CSV, verdicts, pictures; two runs side by side
gather*.py               `ciera bench gather`: one collective at a time, where is the crossover?
"""
