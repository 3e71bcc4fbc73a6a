"""Linear program of one step, for given replicas: how the buckets split over the groups, and how long it takes.

Data       demand_J sequences per bucket; share_kij part of a replica's step per sequence, by measure k
           (`planning.shares`; padded: one measure); num_replicas_I.
Variables  x_ij >= 0, part of bucket j that group i takes; r, the largest load of a replica.
Minimise   r
subject to every_bucket_is_taken(j):  sum_i x_ij = 1
           no_group_exceeds_the_load(k, i):  sum_j share_kij demand_j x_ij <= num_replicas_i * r

The bound is computed from the dual prices, not taken from the solver, so its tolerances cannot spoil it: for any z >= 0
`r >= sum_j demand_j min_i (sum_k z_ki share_kij) / sum_ki z_ki num_replicas_i`. With packed chunks the program sees
classes of neighbouring lengths, and the bound every length.
"""

from dataclasses import dataclass, replace

import highspy
import numpy as np
from highspy._core import _Highs

from planning.errors import PlanError
from planning.shares import CostTable, class_table, longest_alone, measured_shares

STEP_TOLERANCE = 1e-3  # relative width of the interval of T at which the programs stop
MAX_PROGRAMS = 8


@dataclass(frozen=True, slots=True, eq=False)
class StepCosts:
    """One step's sequences: what the program splits (J classes or buckets), and what the bound counts (U lengths)."""

    classes: CostTable
    demand: np.ndarray
    exact: CostTable
    exact_demand: np.ndarray


def bucket_costs(table: CostTable, demand_J: np.ndarray) -> StepCosts:
    """Padded sequences: every bucket is one length."""
    return StepCosts(table, demand_J, table, demand_J)


def class_costs(table: CostTable, demand_U: np.ndarray, ends: np.ndarray) -> StepCosts:
    """Packed sequences in classes that end with the columns `ends`."""
    starts = np.concatenate([[0], ends[:-1] + 1])
    return StepCosts(class_table(table, demand_U, ends), np.add.reduceat(demand_U, starts), table, demand_U)


def class_ends(unique: np.ndarray, counts: np.ndarray, room_I: np.ndarray, num_classes: int) -> np.ndarray:
    """Last columns of classes with about equal tokens; the lengths of a class fit into the same groups."""
    tokens = np.cumsum(unique * counts)
    quantiles = np.searchsorted(tokens, tokens[-1] * np.arange(1, num_classes) / num_classes)
    last_that_fit = np.searchsorted(unique, room_I, side="right") - 1
    return np.unique(np.concatenate([quantiles, last_that_fit[last_that_fit >= 0], [len(unique) - 1]]))


@dataclass(frozen=True, slots=True)
class Split:
    """The fractional split: `part` (I, J) (columns add up to 1), a proven lower bound of the load, dual prices.

    `value` (K, I) are the prices z_ki of a replica, scaled so that `sum_ki z_ki num_replicas_i` is 1.
    """

    part: np.ndarray
    load: float
    value: np.ndarray


@dataclass(frozen=True, slots=True)
class ShortestStep:
    """The fractional optimum: its split, T, and T's lower bound."""

    split: Split
    step_seconds: float
    lower_bound_seconds: float


class SplitSolver:
    """HiGHS with presolve off, kept between solves; nothing of one solve reaches the next."""

    def __init__(self) -> None:
        self._highs = _Highs()  # without Python callbacks, because the constructor of `Highs` prints a banner on stdout
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("presolve", "off")
        self._highs.setOptionValue("threads", 1)

    def shortest_step(self, costs: StepCosts, num_replicas_I: np.ndarray) -> ShortestStep:
        """The shortest step of these replicas, fractions of sequences allowed.

        For load r(T) (`planning.shares`), T * min(1, r(T)) is a bound, and T and T * r(T) enclose the fixed point
        r(T) = 1. Where r jumps, because a sequence alone then just fits into T, halving closes in on the jump.
        """
        present = num_replicas_I > 0
        step_seconds = bound = _least_step_seconds(costs, num_replicas_I)
        if not np.isfinite(bound):
            raise PlanError("a bucket fits on none of the replicas; plan again for these lengths")
        enough = np.inf
        for _ in range(MAX_PROGRAMS):
            share = measured_shares(costs.classes, step_seconds)
            split = self.solve(share, num_replicas_I, costs.demand)
            if costs.exact is not costs.classes:
                exact_share = measured_shares(costs.exact, step_seconds)
                split = replace(split, load=_load(split.value, exact_share, num_replicas_I, costs.exact_demand))
            bound = max(bound, step_seconds * min(1.0, split.load))
            if split.load <= 1 + STEP_TOLERANCE:
                enough = step_seconds
                shortest = ShortestStep(split, step_seconds, bound)
            elif _is_proportional(costs.classes, share[0], present):
                bound = max(bound, step_seconds * split.load)
                return ShortestStep(split, bound, bound)
            else:
                bound = max(bound, step_seconds)
            if enough <= bound * (1 + STEP_TOLERANCE):
                break
            estimate = step_seconds * split.load
            step_seconds = estimate if bound < estimate < enough else (bound + enough) / 2
        return replace(shortest, lower_bound_seconds=bound)

    def solve(self, share_KIJ: np.ndarray, num_replicas_I: np.ndarray, demand_J: np.ndarray) -> Split:
        """The split of least load. Every bucket needs a group with a finite share and at least one replica."""
        usable = np.isfinite(share_KIJ[0]) & (num_replicas_I[:, None] > 0)
        group, bucket = np.nonzero(usable)
        self._highs.clearModel()
        self._highs.passModel(_model(share_KIJ[:, group, bucket] * demand_J[bucket], group, bucket, num_replicas_I))
        self._highs.run()
        if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            raise PlanError(f"HiGHS ended the dispatch program with {self._highs.getModelStatus()}; this is a defect")
        solution = self._highs.getSolution()
        part = np.zeros(usable.shape)
        part[group, bucket] = np.maximum(np.array(solution.col_value)[:-1], 0.0)
        prices_KI = np.maximum(-np.array(solution.row_dual)[len(demand_J) :], 0.0).reshape(len(share_KIJ), -1)
        value_KI = prices_KI / (prices_KI @ num_replicas_I).sum()
        return Split(part / part.sum(axis=0), _load(value_KI, share_KIJ, num_replicas_I, demand_J), value_KI)


def _load(value_KI: np.ndarray, share_KIJ: np.ndarray, num_replicas_I: np.ndarray, demand_J: np.ndarray) -> float:
    """Lower bound of the load, from the worth of replicas (`value_KI @ num_replicas_I` adds up to 1)."""
    return float(demand_J @ prices(value_KI, share_KIJ, num_replicas_I))


def prices(value_KI: np.ndarray, share_KIJ: np.ndarray, num_replicas_I: np.ndarray) -> np.ndarray:
    """What one sequence of each column (J) adds to the load, on the group where it adds least."""
    usable = np.isfinite(share_KIJ[0]) & (num_replicas_I[:, None] > 0)
    worth = (value_KI[:, :, None] * np.where(usable, share_KIJ, 0.0)).sum(axis=0)
    return np.asarray(np.where(usable, worth, np.inf).min(axis=0))


def _is_proportional(table: CostTable, share_IJ: np.ndarray, present_I: np.ndarray) -> bool:
    """Whether the load of these replicas is inversely proportional to T from here on: no bubble, nothing left out."""
    return not table.depth[present_I].any() and bool((np.isfinite(share_IJ) == (table.capacity > 0))[present_I].all())


def _least_step_seconds(costs: StepCosts, num_replicas_I: np.ndarray) -> float:
    """A lower bound without a program: the work's GPU seconds over the GPUs, and the longest sequence alone."""
    table, present = costs.exact, num_replicas_I > 0
    gpu_seconds = costs.exact_demand @ (table.num_gpus[:, None] * table.least_seconds)[present].min(axis=0)
    return max(float(gpu_seconds / (num_replicas_I @ table.num_gpus)), longest_alone(table, present))


def _model(load: np.ndarray, group: np.ndarray, bucket: np.ndarray, num_replicas_I: np.ndarray) -> highspy.HighsLp:
    """Columns: one x per usable (group, bucket) pair, then r. Rows: buckets, then groups, measure after measure."""
    (num_measures, num_parts), num_groups = load.shape, len(num_replicas_I)
    num_buckets, num_loads = int(bucket.max()) + 1, num_measures * num_groups
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = num_parts + 1, num_buckets + num_loads
    lp.col_cost_ = np.append(np.zeros(num_parts), 1.0)
    lp.col_lower_ = np.zeros(num_parts + 1)
    lp.col_upper_ = np.full(num_parts + 1, highspy.kHighsInf)
    lp.row_lower_ = np.append(np.ones(num_buckets), np.full(num_loads, -highspy.kHighsInf))
    lp.row_upper_ = np.append(np.ones(num_buckets), np.zeros(num_loads))
    rows = [bucket, *(num_buckets + measure * num_groups + group for measure in range(num_measures))]
    per_column = 1 + num_measures
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.append(per_column * np.arange(num_parts + 1), per_column * num_parts + num_loads)
    lp.a_matrix_.index_ = np.append(np.column_stack(rows), num_buckets + np.arange(num_loads))
    lp.a_matrix_.value_ = np.append(np.vstack([np.ones(num_parts), load]).T, np.tile(-num_replicas_I, num_measures))
    return lp
