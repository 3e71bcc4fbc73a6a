"""What a replica of each configuration is worth: the dual prices of the deployment program with fractions of replicas.

Data       load_ij part of a replica's step that group j of the sequences takes on configuration i, for a step of T
           seconds (`planning.shares`); num_gpus_i per replica; max_gpus; a box fewest_i <= p_i <= most_i.
Variables  p_i replicas, fractions allowed; x_ij >= 0, part of group j on configuration i; v, throughput.
Maximise   v
subject to every_group_is_served(j):  sum_i x_ij = v
           replicas_are_not_overloaded(i):  sum_j load_ij x_ij <= p_i            (its dual: the worth z_i of a replica)
           gpus_suffice:  sum_i num_gpus_i p_i <= max_gpus
           longest_group_has_a_home:  sum of p_i over the i that can take the last group >= 1

The same program as `deployment_milp`, relaxed. What the prices are used for needs no trust in the solver:
`largest_worth` says exactly what the best plan of whole replicas in the box is worth.
"""

from dataclasses import dataclass

import highspy
import numpy as np
from highspy._core import _Highs
from scipy.sparse import coo_array

from planning.errors import PlanError

WHOLE = 1e-6  # replicas; a smaller fraction is the solver's rounding


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """Plans with `fewest` <= replicas <= `most` of each configuration (I)."""

    fewest: np.ndarray
    most: np.ndarray

    def split(self, replicas: np.ndarray, weight: np.ndarray) -> "tuple[Box, Box] | None":
        """Two boxes that hold all plans of this one and neither of which holds these fractions of replicas.

        Split is the configuration with the most weighted fraction; None where all numbers are whole.
        """
        fraction = np.abs(replicas - np.round(replicas))
        if fraction.max() < WHOLE:
            return None
        i = int((fraction * weight).argmax())
        below, above = self.most.copy(), self.fewest.copy()
        below[i] = int(replicas[i])
        above[i] = int(replicas[i]) + 1
        return Box(self.fewest, below), Box(above, self.most)


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """Throughput v, the worth of a replica of each configuration (I), and the fractional plan (I)."""

    throughput: float
    worth: np.ndarray
    replicas: np.ndarray


class PriceProgram:
    """The program above in HiGHS; solved again and again for other boxes, each time from the last basis."""

    def __init__(self, load: np.ndarray, num_gpus: np.ndarray, max_gpus: int) -> None:
        self._num_configs, self._num_groups = load.shape
        self._highs = _Highs()
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("presolve", "off")
        self._highs.setOptionValue("threads", 1)
        self._highs.passModel(_model(load, num_gpus, max_gpus))
        self._first_replicas = int(np.isfinite(load).sum())

    def solve(self, box: Box) -> Prices:
        """The optimum of a box that holds a plan."""
        first, num_configs = self._first_replicas, self._num_configs
        columns = np.arange(first, first + num_configs, dtype=np.int32)
        self._highs.changeColsBounds(num_configs, columns, box.fewest.astype(float), box.most.astype(float))
        self._highs.run()
        if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            raise PlanError(f"HiGHS ended the price program with {self._highs.getModelStatus()}; this is a defect")
        solution = self._highs.getSolution()
        value = np.array(solution.col_value)
        worth = -np.array(solution.row_dual)[self._num_groups : self._num_groups + num_configs]
        return Prices(float(value[-1]), np.maximum(worth, 0.0), value[first:-1])


def _model(load: np.ndarray, num_gpus: np.ndarray, max_gpus: int) -> highspy.HighsLp:
    """Columns: one x per usable (configuration, group) pair, p, v. Rows in the order of the module's text."""
    num_configs, num_groups = load.shape
    config, group = np.nonzero(np.isfinite(load))
    x, p, v = np.arange(len(config)), len(config) + np.arange(num_configs), len(config) + num_configs
    served, overloaded = np.arange(num_groups), num_groups + np.arange(num_configs)
    gpus, home = num_groups + num_configs, num_groups + num_configs + 1
    homes = p[np.isfinite(load[:, -1])]
    parts = (
        (group, x, np.ones(len(x))),
        (served, np.full(num_groups, v), -np.ones(num_groups)),
        (overloaded[config], x, load[config, group]),
        (overloaded, p, -np.ones(num_configs)),
        (np.full(num_configs, gpus), p, num_gpus.astype(float)),
        (np.full(len(homes), home), homes, np.ones(len(homes))),
    )
    row, column, entry = (np.concatenate([part[k] for part in parts]) for k in range(3))
    matrix = coo_array((entry, (row, column)), shape=(home + 1, v + 1)).tocsc()
    infinite = highspy.kHighsInf
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = v + 1, home + 1
    lp.col_cost_ = np.append(np.zeros(v), -1.0)
    lp.col_lower_ = np.zeros(v + 1)
    lp.col_upper_ = np.full(v + 1, infinite)
    lp.row_lower_ = np.concatenate([np.zeros(num_groups), np.full(num_configs + 1, -infinite), [1.0]])
    lp.row_upper_ = np.concatenate([np.zeros(num_groups + num_configs), [float(max_gpus), infinite]])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
    return lp


def largest_worth(worth: np.ndarray, num_gpus: np.ndarray, max_gpus: int, is_home: np.ndarray, box: Box) -> float:
    """max of `worth @ p` over plans p of the box on `max_gpus` GPUs with a home; minus infinity if there is none.

    A knapsack with up to `most - fewest` pieces of each kind, solved exactly.
    """
    given = float(worth @ box.fewest)
    room = max_gpus - int(num_gpus @ box.fewest)
    spare = box.most - box.fewest
    if room < 0:
        return -np.inf
    if box.fewest[is_home].any():
        return given + _knapsack(worth, num_gpus, spare, room)
    first = np.flatnonzero(is_home & (spare > 0) & (num_gpus <= room))
    left = [spare - (np.arange(len(spare)) == i) for i in first]
    ways = [
        worth[i] + _knapsack(worth, num_gpus, rest, room - int(num_gpus[i]))
        for i, rest in zip(first, left, strict=True)
    ]
    return given + max(ways, default=-np.inf)


def _knapsack(worth: np.ndarray, size: np.ndarray, number: np.ndarray, room: int) -> float:
    """Bundles of 1, 2, 4, ... pieces of a kind stand for any number of them."""
    best = np.zeros(room + 1)
    for value, pieces_size, left in zip(worth.tolist(), size.tolist(), number.tolist(), strict=True):
        bundle, rest = 1, left
        while rest > 0:
            pieces = min(bundle, rest)
            taken = pieces * pieces_size
            if taken > room:
                break
            best[taken:] = np.maximum(best[taken:], best[: room + 1 - taken] + pieces * value)
            bundle, rest = 2 * bundle, rest - pieces
    return float(best[room])
