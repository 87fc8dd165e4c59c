"""Reachability: the nodes of a directed graph that node 0 reaches within h steps."""

import numpy as np

from deeploop.data.draws import orders
from deeploop.tasks.iterate.problems.base import IteratedTask, with_begin


class Reachability(IteratedTask):
    """`length` nodes on a path in random order, and length // 4 edges between random nodes.

    The path makes the graph deep: in a random graph with two edges per node all nodes are reached within log
    n steps. There is a token for each edge, in random order, then all nodes, each with the answer 0 or 1.
    """

    name = "reachability"

    def __init__(self, length: int) -> None:
        self.length = length
        self._extra = length // 4
        self._edges = length - 1 + self._extra
        self.tokens, self.answers = 1 + self._edges + length, slice(1 + self._edges, None)
        self._nodes = max(2, length)  # 0 and 1 are also answers
        self.vocabulary = self._nodes + length**2 + 1
        self.random_words = length + 2 * self._extra + self._edges

    def make(self, random: np.ndarray) -> np.ndarray:
        """Edges as from · length + to, in the order of listing."""
        n, extra = self.length, self._extra
        path, pairs, order = np.split(random, np.cumsum([n, 2 * extra]), axis=1)
        nodes = orders(path)
        along = n * nodes[:, :-1] + nodes[:, 1:]
        beside = (pairs % np.uint64(n)).astype(np.int64)
        edges = np.concatenate([along, n * beside[:, :extra] + beside[:, extra:]], axis=1)
        return np.take_along_axis(edges, orders(order), axis=1)

    def identity(self, instances: np.ndarray) -> np.ndarray:
        """The graph, independent of the order of listing."""
        return np.sort(instances, axis=1)

    def inputs(self, instances: np.ndarray) -> np.ndarray:
        nodes = np.broadcast_to(np.arange(self.length), (len(instances), self.length))
        return with_begin(np.concatenate([self._nodes + instances, nodes], axis=1), self.vocabulary - 1)

    def start(self, instances: np.ndarray) -> np.ndarray:
        return np.tile(np.arange(self.length) == 0, (len(instances), 1)).astype(np.int64)

    def advance(self, instances: np.ndarray, state: np.ndarray) -> np.ndarray:
        sources, ends = np.divmod(instances, self.length)
        following = state.copy()
        reached = np.take_along_axis(state, sources, axis=1)
        np.maximum.at(following, (np.arange(len(state))[:, None], ends), reached)
        return following
