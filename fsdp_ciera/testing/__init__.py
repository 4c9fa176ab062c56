"""For tests of training code: ranks on one machine, a comparison with stock FSDP2, and faults to drill with.

run_ranks            a function on several ranks, each a process of this machine
compare_with_stock   the same training under stock FSDP2 and under a policy: equal bits, or an error that names what differs
inject               one rank does something wrong, to see what your program makes of the error
"""

from fsdp_ciera.errors import RankFailure
from fsdp_ciera.testing.compare import ShardFunction, check_equal, compare_with_stock
from fsdp_ciera.testing.inject import FAULTS, inject
from fsdp_ciera.testing.ranks import run_ranks

__all__ = ["FAULTS", "RankFailure", "ShardFunction", "check_equal", "compare_with_stock", "inject", "run_ranks"]
