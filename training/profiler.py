"""Measures the cost of every parallel configuration with the real fleet on this hardware.

For each <tp,pp> that model and cluster allow, as many copies as fit on the reserved ranks train at the same time, on
chunks of random tokens through the run's own adapters: at each length those of the tenants that have such sequences, as
often as a step has them. One pass warms up and measures memory; the others time all
chunks in an order of their own, so that noise spreads, and the median counts. Seconds per stage: a flush of m chunks
through pp stages takes (m + pp - 1) of them (paper, appendix D, Eq. 12).

Measured: seconds of chunks, overhead of a step, peak bytes of activations. Modelled: bytes of weights, adapters and
optimiser (planning.memory). Not covered: one layer extrapolated to a model that does not fit.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from planning.candidates import Candidates, propose_candidates
from planning.config import Batching, ClusterConfig, PlannerConfig
from planning.memory import bytes_per_token
from planning.profile import LayerCost, MeasuredConfig, Profile
from planning.types import ActivationPolicy, Candidate, ModelShape, ParallelConfig, ReplicaGroup, replicas_of
from training.base_model import BaseModel
from training.config import BaseModelConfig, TenantConfig
from training.fleet import Fleet, FleetError
from training.fleet_spec import FleetSpec
from training.probe import Probe
from training.profile_fit import ChunkTiming, MeasuredProfile, fit_cost

NUM_LENGTHS = 4
LENGTH_RATIO = 4  # between neighbouring lengths of the grid
SHORTEST_TOKENS = 16
NUM_PACKED = 3
REPETITIONS = 5
MIN_CHUNKS = 4  # per flush, so that tenants take turns also where a chunk holds one sequence
NUM_OWNERS = 20
NEGLIGIBLE_LEARNING_RATE = 1e-12  # updates are timed, but must not drive the adapters to NaN on random tokens
LAUNCH_TIMEOUT_SECONDS = 600.0
PROBE_TIMEOUT_SECONDS = 1800.0

Progress = Callable[[int, int, ParallelConfig], None]


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure: the model with these tenants' adapters on this cluster, at the lengths of their histogram."""

    base: BaseModel
    base_model: BaseModelConfig
    tenants: tuple[TenantConfig, ...]
    cluster: ClusterConfig
    planner: PlannerConfig
    activations: ActivationPolicy
    histogram: pl.DataFrame
    log_dir: Path

    @property
    def shape(self) -> ModelShape:
        return self.base.shape(self.base_model.dtype)

    @property
    def sequences_per_step(self) -> int:
        return sum(tenant.batch_size for tenant in self.tenants)

    @property
    def longest_tokens(self) -> int:
        return int(self.histogram["length"].max())

    @property
    def tokens_per_step(self) -> int:
        """Expected tokens of a step's sequences."""
        means = self.histogram.group_by("tenant").agg(
            mean=(pl.col("length") * pl.col("count")).sum() / pl.col("count").sum()
        )
        mean_tokens = dict(means.iter_rows())
        return round(sum(tenant.batch_size * mean_tokens[tenant.name] for tenant in self.tenants))

    @property
    def largest_tenant(self) -> TenantConfig:
        """The tenant whose adapter has the most parameters."""
        return max(
            self.tenants, key=lambda t: self.base.num_adapter_parameters(t.adapter.rank, t.adapter.target_modules)
        )


def measurable(request: ProfileRequest) -> Candidates:
    """What model, memory model and cluster allow: planning's own checks, under a profile that knows every tp."""
    cost = dict.fromkeys(range(1, request.cluster.num_gpus + 1), LayerCost(1.0, 1.0, 1.0))
    anything = Profile("any", "not measured", request.base.num_layers, cost)
    adapters = [tenant.adapter for tenant in request.tenants]
    num_adapter_parameters = sum(request.base.num_adapter_parameters(a.rank, a.target_modules) for a in adapters)
    return propose_candidates(
        request.shape, anything, request.cluster, request.planner, num_adapter_parameters, request.activations
    )


def is_complete(request: ProfileRequest, profile: Profile) -> bool:
    """Whether every configuration that the request would measure was measured for the profile."""
    return all(candidate.config in profile.measured for candidate in measurable(request).usable)


def measure_profile(
    request: ProfileRequest, progress: Progress = lambda _done, _total, _config: None
) -> MeasuredProfile:
    """Measure all configurations, one after the other. Raises FleetError naming the configuration that failed.

    `progress` is told how many of how many configurations are done, and which comes next (or was the last).
    """
    candidates = measurable(request).usable
    timings: list[ChunkTiming] = []
    overhead_seconds: dict[ParallelConfig, float] = {}
    for number, candidate in enumerate(candidates):
        progress(number, len(candidates), candidate.config)
        measured, overhead_seconds[candidate.config] = measure_config(request, candidate)
        timings += measured
    progress(len(candidates), len(candidates), candidates[-1].config)
    fit = fit_cost(timings, request.base.num_layers)
    profile = Profile(
        name=request.base.folder.name,
        source=f"measured with {len(timings)} chunks; error of the fit: mean {fit.mean_error:.1%}, largest "
        f"{fit.max_error:.1%} at {fit.worst}",
        num_layers=request.base.num_layers,
        layer_cost_by_tp=fit.layer_cost_by_tp,
        measured={
            config: MeasuredConfig(factor, overhead_seconds[config], _peak_bytes_per_token(timings, config))
            for config, factor in fit.stage_factors.items()
        },
        recompute=request.activations.recompute,
    )
    modelled = {c.config: bytes_per_token(request.shape, c.config, request.activations) for c in candidates}
    return MeasuredProfile(profile, fit, modelled)


def measure_config(request: ProfileRequest, candidate: Candidate) -> tuple[list[ChunkTiming], float]:
    """Timings of one configuration's grid, and the median overhead seconds of a step."""
    config = candidate.config
    num_slots = _num_chunks(config) + config.pp - 1
    probes = probe_grid(request, candidate)
    seconds: dict[Probe, list[float]] = {probe: [] for probe in probes}
    overheads: list[float] = []
    order = random.Random(0)
    try:
        with Fleet(_spec(request, config), generation=1) as fleet:
            fleet.launch(LAUNCH_TIMEOUT_SECONDS)
            peaks = {probe: _peak_bytes(fleet, probe, request.largest_tenant.name) for probe in probes}
            for repetition in range(REPETITIONS):
                for probe in order.sample(probes, len(probes)):
                    start = time.perf_counter()
                    reports = fleet.profile(_turned(probe, repetition * MIN_CHUNKS))
                    wall_seconds = time.perf_counter() - start
                    busy = _busy_by_replica(reports)
                    seconds[probe].append(statistics.mean(busy) / num_slots)
                    overheads.append(wall_seconds - max(busy))
    except FleetError as error:
        raise FleetError(f"profiling {config}: {error}") from error
    timings = [
        ChunkTiming(config, p.num_sequences, p.length, p.batching, statistics.median(seconds[p]), peaks[p])
        for p in probes
    ]
    return timings, statistics.median(overheads)


def probe_grid(request: ProfileRequest, candidate: Candidate) -> list[Probe]:
    """Lengths down from the longest by a constant ratio; per length one sequence, a full chunk, and between them.

    A full chunk holds what memory allows, but no more sequences and tokens than a step has. The largest chunks of
    several sequences are also measured packed.
    """
    longest = min(request.longest_tokens, candidate.max_chunk_tokens)
    largest_tokens = min(candidate.max_chunk_tokens, max(longest, request.tokens_per_step))
    lengths = sorted({max(min(SHORTEST_TOKENS, longest), longest // LENGTH_RATIO**n) for n in range(NUM_LENGTHS)})
    shapes = []
    for length in lengths:
        largest = min(largest_tokens // length, request.sequences_per_step)
        shapes += [(num_sequences, length) for num_sequences in sorted({1, round(largest**0.5), largest})]
    several = sorted((shape for shape in shapes if shape[0] > 1), key=lambda shape: -shape[0] * shape[1])[:NUM_PACKED]
    return [
        Probe(
            num_sequences=num_sequences,
            length=length,
            batching=batching,
            num_chunks=_num_chunks(candidate.config),
            owners=owners_at(request, length),
        )
        for batching, chosen in ((Batching.PADDED, shapes), (Batching.PACKED, several))
        for num_sequences, length in chosen
    ]


def owners_at(request: ProfileRequest, length: int) -> tuple[str, ...]:
    """NUM_OWNERS tenants in turn, each as often as its sequences near `length` come in a step, evenly interleaved.

    Near is within LENGTH_RATIO either way; where nobody has such sequences, all lengths count.
    """
    batch_sizes = {tenant.name: tenant.batch_size for tenant in request.tenants}
    near = pl.col("length").is_between(length / LENGTH_RATIO, length * LENGTH_RATIO)
    shares = {
        str(name): rows.filter(near)["count"].sum() / rows["count"].sum() * batch_sizes[str(name)]
        for (name,), rows in request.histogram.group_by("tenant", maintain_order=True)
    }
    weights = shares if any(shares.values()) else batch_sizes
    total = sum(weights.values())
    owners: list[str] = []
    for turn in range(1, NUM_OWNERS + 1):
        owners.append(max(weights, key=lambda name: weights[name] / total * turn - owners.count(name)))
    return tuple(owners)


def _num_chunks(config: ParallelConfig) -> int:
    return max(MIN_CHUNKS, 2 * config.pp)


def _turned(probe: Probe, turns: int) -> Probe:
    """The probe with other tenants first, so that repetitions of a chunk of one sequence differ in whose it is."""
    turns %= len(probe.owners)
    return probe.model_copy(update={"owners": probe.owners[turns:] + probe.owners[:turns]})


def _spec(request: ProfileRequest, config: ParallelConfig) -> FleetSpec:
    """As many copies as fit."""
    copies = ReplicaGroup(config, request.cluster.num_gpus // config.num_gpus)
    tenants = tuple(
        tenant.model_copy(
            update={"optimiser": tenant.optimiser.model_copy(update={"learning_rate": NEGLIGIBLE_LEARNING_RATE})}
        )
        for tenant in request.tenants
    )
    return FleetSpec(
        replicas=replicas_of((copies,)),
        base_model=request.base_model,
        tenants=tenants,
        token_paths={},
        checkpoint=None,
        num_updates={tenant.name: 0 for tenant in tenants},
        backend=request.cluster.backend,
        step_timeout_seconds=PROBE_TIMEOUT_SECONDS,
        log_dir=request.log_dir / f"tp{config.tp}-pp{config.pp}",
        activations=request.activations,
    )


def _peak_bytes(fleet: Fleet, probe: Probe, tenant: str) -> int:
    reports = fleet.profile(probe.model_copy(update={"measures_memory": True, "owners": (tenant,)}))
    return max(report["peak_bytes"] for report in reports)


def _busy_by_replica(reports: Sequence[dict]) -> list[float]:
    busy: dict[int, float] = {}
    for report in reports:
        busy[report["replica"]] = max(busy.get(report["replica"], 0.0), report["busy_seconds"])
    return list(busy.values())


def _peak_bytes_per_token(timings: Sequence[ChunkTiming], config: ParallelConfig) -> float:
    """The worst of the chunks of at least half the largest one's tokens; constants weigh too much in smaller ones."""
    own = [timing for timing in timings if timing.config == config]
    largest = max(timing.num_tokens for timing in own)
    return max(timing.peak_bytes / timing.num_tokens for timing in own if 2 * timing.num_tokens >= largest)
