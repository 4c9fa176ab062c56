"""Topology: how a process group is cut into nodes, and the process groups of the hierarchical gather.

flat            every rank exchanges with every other one
hierarchical    1. between nodes, compressed: the ranks of equal local index, one on each node
                2. inside each node, plain, over its fast links: what step 1 brought

4 ranks, 2 a node                    step 1: {0, 2}, {1, 3}           step 2: {0, 1}, {2, 3}
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_ciera._compat import all_gather_bytes, new_local_group
from fsdp_ciera.errors import CieraPolicyError
from fsdp_ciera.policy import CieraPolicy


@dataclass(frozen=True)
class Cut:
    """A process group's `num_nodes * ranks_per_node` ranks; the rank with index i is number i % ranks_per_node of its node.

    A flat gather has the cut into nodes of one rank.
    """

    num_nodes: int
    ranks_per_node: int = 1

    @property
    def is_flat(self) -> bool:
        """Whether there is nothing to do inside a node."""
        return self.ranks_per_node == 1

    @property
    def world_size(self) -> int:
        """The number of ranks in the process group."""
        return self.num_nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """The node of the rank with this index in the process group."""
        return rank // self.ranks_per_node

    def local_of(self, rank: int) -> int:
        """The number inside its node of the rank with this index in the process group."""
        return rank % self.ranks_per_node


class NodeGroups:
    """The two process groups of this rank in a hierarchical gather."""

    def __init__(self, process_group: dist.ProcessGroup, cut: Cut) -> None:
        """Collective over `process_group`: all its ranks must get here with the same `cut`."""
        self.parent = process_group
        ranks = dist.get_process_group_ranks(process_group)
        local, node = cut.local_of(process_group.rank()), cut.node_of(process_group.rank())
        # See [Note: Names of process groups]: a number that the first rank has drawn, since a store remembers old names
        drawn = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8)
        name = f"fsdp_ciera/{bytes(all_gather_bytes(drawn, process_group)[0].tolist()).hex()}"
        on_every_node = ranks[local :: cut.ranks_per_node]
        self.between_nodes = new_local_group(on_every_node, process_group, f"{name}/between/{local}")
        in_node = ranks[node * cut.ranks_per_node : (node + 1) * cut.ranks_per_node]
        self.in_node = new_local_group(in_node, process_group, f"{name}/in/{node}")


NODE_GROUPS: dict[tuple[str, Cut], NodeGroups] = {}
"""The registry of node groups: one per process group and cut, shared by all parameter groups that gather over it."""


def node_groups_of(process_group: dist.ProcessGroup, cut: Cut) -> NodeGroups:
    """The node groups of a process group. The first call for it makes them, and is collective over it.

    A process group that was destroyed and made again under the same name gets new ones.
    """
    key = (process_group.group_name, cut)
    node_groups = NODE_GROUPS.get(key)
    if node_groups is None or node_groups.parent is not process_group:
        node_groups = NODE_GROUPS[key] = NodeGroups(process_group, cut)
    return node_groups


def ranks_per_node_of(policy: CieraPolicy) -> int | None:
    """The number of ranks on a node: the policy's, or the one that torchrun and its like put into `LOCAL_WORLD_SIZE`; `None`
    when nobody says."""
    if policy.ranks_per_node is not None:
        return policy.ranks_per_node
    variable = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(variable) if variable.isdecimal() and int(variable) else None


def cut_of(ranks: Sequence[int], policy: CieraPolicy) -> Cut:
    """The cut of a process group of these global ranks under `policy`: rank r is on node r // ranks_per_node.

    Flat for `topology="flat"`, and for every process group that nodes do not cut evenly into several parts of several ranks:
    one that lies in a single node (an HSDP shard group, often), one with a single rank a node, and uneven ones.
    """
    ranks_per_node = None if policy.topology == "flat" else ranks_per_node_of(policy)
    flat = Cut(len(ranks))
    if ranks_per_node is None:
        return flat
    nodes = [rank // ranks_per_node for rank in ranks]
    num_nodes = len(set(nodes))
    local_size = len(ranks) // num_nodes
    is_even = all(node == nodes[index // local_size * local_size] for index, node in enumerate(nodes))
    if num_nodes == 1 or local_size == 1 or num_nodes * local_size != len(ranks) or not is_even:
        return flat
    return Cut(num_nodes, local_size)


def check_node_size(policy: CieraPolicy) -> None:
    """Raises `CieraPolicyError` when a hierarchical gather is asked for and nobody says how large a node is."""
    if policy.topology == "hierarchical" and ranks_per_node_of(policy) is None:
        raise CieraPolicyError(
            'topology="hierarchical" needs the number of ranks on a node, but LOCAL_WORLD_SIZE is not set: give '
            "CieraPolicy(ranks_per_node=...), or start with torchrun, which sets it"
        )
