"""The measuring stand: the same job by stock FSDP2, its rivals and every setting of ours, over real links, in one run.

options.py               hosts, links and turns of a run: the options of `ciera bench e2e`
netns.py, local.py       hosts on one machine: namespaces with throttled links, or plain processes (ranks.py: both)
job.py                   what is trained
contenders.py            who trains it, by key; peers.py, zero3.py: rivals that are not ours
rank.py                  one rank: its turns, timed by profiling.instruments, with a reduce-scatter of its own (ring.py)
run.py                   rounds A B C, A B C over all hosts -> results.py, with machine.py's names
report.py, ablation.py, compare.py   figures, CSV, verdicts; two runs side by side; frames.py: what all reports share
gather_rank.py, gather_cells.py      one collective at a time: its ranks, and what follows from its figures

Commands are in cli/tasks/ (bench_e2e.py, bench_gather.py), tables in cli/tables/, pictures in cli/figures/.
"""
