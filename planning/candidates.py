"""Which parallel configurations can be used, what they cost, and why the others cannot.

Considered are tensor-parallel degrees that are powers of two or divide the number of heads, and pipeline degrees that
are powers of two or divide the number of layers, within the cluster and the planner's limits. Nothing is dropped for
being slow: the deployment search weighs that (the paper's throughput rule drops useful configurations).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planning.config import ClusterConfig, PlannerConfig
from planning.errors import PlanInfeasibleError, ProfileError
from planning.memory import KEEP_ALL, max_chunk_tokens
from planning.profile import MeasuredConfig, Profile
from planning.types import ActivationPolicy, Candidate, ModelShape, ParallelConfig, PrunedConfig

BYTES_PER_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Candidates:
    """Usable configurations, sorted by <tp,pp>, and the pruned ones with reasons; `caveat` is the profile's."""

    usable: tuple[Candidate, ...]
    pruned: tuple[PrunedConfig, ...] = ()
    caveat: str = ""

    @property
    def by_config(self) -> Mapping[ParallelConfig, Candidate]:
        return {candidate.config: candidate for candidate in self.usable}

    @property
    def roomiest(self) -> Candidate:
        """The candidate that holds the largest chunk; the one with the fewest GPUs on a tie."""
        return max(self.usable, key=lambda candidate: (candidate.max_chunk_tokens, -candidate.config.num_gpus))


def propose_candidates(
    shape: ModelShape,
    profile: Profile,
    cluster: ClusterConfig,
    planner: PlannerConfig,
    num_adapter_parameters: int,
    activations: ActivationPolicy = KEEP_ALL,
) -> Candidates:
    """All configurations of at most `cluster.num_gpus` GPUs, usable or pruned.

    Raises ProfileError when the profile belongs to a model of another depth, and PlanInfeasibleError, with the
    reason of every configuration, when none can be used.
    """
    if profile.num_layers != shape.num_layers:
        raise ProfileError(
            f"profile {profile.name} was made for a model of {profile.num_layers} layers, the base model has "
            f"{shape.num_layers}; choose the profile of this base model"
        )
    usable: list[Candidate] = []
    pruned: list[PrunedConfig] = []
    memory_bytes = int(cluster.memory_per_gpu_gib * BYTES_PER_GIB)
    for config in _considered(shape, cluster, planner):
        reason = _why_not(shape, profile, cluster, config)
        if reason is None:
            capacity = (
                profile.max_chunk_tokens[config]
                if profile.max_chunk_tokens is not None
                else max_chunk_tokens(
                    shape,
                    config,
                    memory_bytes,
                    num_adapter_parameters,
                    _measured(profile, config).bytes_per_token,
                    activations,
                )
            )
            if capacity:
                usable.append(_candidate(profile, config, capacity))
                continue
            reason = f"does not fit in {cluster.memory_per_gpu_gib:g} GiB per GPU"
        pruned.append(PrunedConfig(config, reason))
    if not usable:
        reasons = "; ".join(f"{entry.config} {entry.reason}" for entry in pruned)
        raise PlanInfeasibleError(
            f"no parallel configuration can be used on {cluster.num_gpus} GPUs: {reasons}. Raise cluster.num_gpus, "
            "cluster.memory_per_gpu_gib, planner.max_tp or planner.max_pp, or choose a profile that covers them"
        )
    return Candidates(tuple(usable), tuple(pruned), profile.caveat)


def candidates_of_profile(profile: Profile, num_gpus: int, planner: PlannerConfig) -> Candidates:
    """Every configuration of a profile's memory table of at most `num_gpus` GPUs: planning without a model folder.

    Raises ProfileError when the profile has no memory table, PlanInfeasibleError when nothing fits.
    """
    if profile.max_chunk_tokens is None:
        raise ProfileError(f"profile {profile.name} has no max_chunk_tokens; choose a preset that has them")
    usable: list[Candidate] = []
    pruned: list[PrunedConfig] = []
    for config, capacity in sorted(profile.max_chunk_tokens.items()):
        if config.num_gpus > num_gpus:
            pruned.append(PrunedConfig(config, f"needs {config.num_gpus} GPUs, there are {num_gpus}"))
        elif config.tp > planner.max_tp or config.pp > planner.max_pp:
            pruned.append(PrunedConfig(config, "exceeds planner.max_tp or planner.max_pp"))
        else:
            usable.append(_candidate(profile, config, capacity))
    if not usable:
        smallest = min(config.num_gpus for config in profile.max_chunk_tokens)
        raise PlanInfeasibleError(
            f"no configuration of profile {profile.name} fits on {num_gpus} GPUs; raise cluster.num_gpus to at least "
            f"{smallest}, or planner.max_tp and planner.max_pp"
        )
    return Candidates(tuple(usable), tuple(pruned), profile.caveat)


def fastest_per_size(candidates: Candidates, lengths: Sequence[int]) -> Candidates:
    """The paper's proposal (section 4.1): per number of GPUs and length, only the configuration of most throughput.

    An option for comparison: it drops configurations that the best plans use.
    """
    sizes = sorted({candidate.config.num_gpus for candidate in candidates.usable})
    kept = set()
    for size in sizes:
        same = [candidate for candidate in candidates.usable if candidate.config.num_gpus == size]
        for length in lengths:
            holding = [candidate for candidate in same if candidate.max_chunk_tokens >= length]
            if holding:
                kept.add(min(holding, key=lambda candidate: _seconds_per_sequence(candidate, length)).config)
    dropped = tuple(
        PrunedConfig(candidate.config, f"is never the fastest of {candidate.config.num_gpus} GPUs (paper's proposal)")
        for candidate in candidates.usable
        if candidate.config not in kept
    )
    usable = tuple(candidate for candidate in candidates.usable if candidate.config in kept)
    return Candidates(usable, candidates.pruned + dropped, candidates.caveat)


def _seconds_per_sequence(candidate: Candidate, length: int) -> float:
    count = candidate.max_chunk_tokens // length
    return candidate.chunk_seconds(count, length) / count


def _considered(shape: ModelShape, cluster: ClusterConfig, planner: PlannerConfig) -> list[ParallelConfig]:
    def degrees(limit: int, divided: int) -> list[int]:
        return [n for n in range(1, limit + 1) if n & (n - 1) == 0 or divided % n == 0]

    max_tp = min(planner.max_tp, cluster.gpus_per_node, cluster.num_gpus)
    max_pp = min(planner.max_pp, cluster.num_gpus)
    return [
        ParallelConfig(tp, pp)
        for tp in degrees(max_tp, shape.num_heads)
        for pp in degrees(max_pp, shape.num_layers)
        if tp * pp <= cluster.num_gpus
    ]


def _why_not(shape: ModelShape, profile: Profile, cluster: ClusterConfig, config: ParallelConfig) -> str | None:
    for count, noun in (
        (shape.num_heads, "attention heads"),
        (shape.num_kv_heads, "key-value heads"),
        (shape.ffn_size, "MLP columns"),
    ):
        if count % config.tp:
            return f"splits {count} {noun} unevenly over tp {config.tp}"
    if cluster.num_gpus > cluster.gpus_per_node and cluster.gpus_per_node % config.tp:
        return f"would let groups of tp {config.tp} straddle nodes of {cluster.gpus_per_node} GPUs"
    if shape.num_layers % config.pp:
        return f"splits {shape.num_layers} layers unevenly over pp {config.pp}"
    if config.tp not in profile.layer_cost_by_tp:
        return f"has no coefficients for tp {config.tp} in profile {profile.name}"
    if profile.max_chunk_tokens is not None and config not in profile.max_chunk_tokens:
        return f"is not in the memory table of profile {profile.name}"
    return None


def _candidate(profile: Profile, config: ParallelConfig, capacity: int) -> Candidate:
    cost = profile.layer_cost_by_tp[config.tp]
    measured = _measured(profile, config)
    num_layers = profile.num_layers // config.pp * measured.stage_factor
    boundary = profile.boundary_seconds_per_token if config.pp > 1 else 0.0
    return Candidate(
        config=config,
        max_chunk_tokens=capacity,
        fixed_seconds=cost.fixed_seconds * num_layers,
        seconds_per_token=cost.seconds_per_token * num_layers + boundary,
        seconds_per_token2=cost.seconds_per_token2 * num_layers,
        step_overhead_seconds=measured.step_overhead_seconds,
    )


def _measured(profile: Profile, config: ParallelConfig) -> MeasuredConfig:
    return profile.measured.get(config, MeasuredConfig())
