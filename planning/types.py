"""Nouns of planning: parallel configurations, replicas, plans, chunks, dispatches. All frozen, all plain numbers.

Lengths are tokens of one sequence, prompt and response together. A padded chunk of b sequences computes b * padded
length tokens. Seconds are those of the cost model unless a name says measured.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ParallelConfig:
    """How one replica of the base model is split: <tp,pp>."""

    tp: int
    pp: int

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"<{self.tp},{self.pp}>"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a decoder-only base model that decide how it can be split and what it weighs.

    `head_dim` is explicit because some architectures do not use hidden_size / num_heads. `bytes_per_parameter`
    is that of the frozen weights and activations: 4 for float32, 2 for bfloat16.
    """

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool = False
    bytes_per_parameter: int = 4


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """What replicas do to hold fewer activations.

    `recompute`: a layer keeps its input only, and its forward runs again in backward. `sequence_parallel`: where tp is
    above 1, what lies between a layer's linears (norms, residuals) is split by tokens over tensor parallelism.
    """

    recompute: bool = False
    sequence_parallel: bool = False

    def __str__(self) -> str:
        parts = ["recompute"] * self.recompute + ["sequence parallel"] * self.sequence_parallel
        return " and ".join(parts) or "neither recompute nor sequence parallel"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A parallel configuration that the model, the cluster and the profile allow, with its cost.

    Seconds of one chunk on one pipeline stage, forward and backward:
    `fixed_seconds + seconds_per_token * tokens + seconds_per_token2 * sum(length^2)`, tokens and lengths as computed
    (after padding). `max_chunk_tokens` is the largest chunk that fits in memory, `step_overhead_seconds` what a step
    takes beside forward and backward (0 where nobody measured it).
    """

    config: ParallelConfig
    max_chunk_tokens: int
    fixed_seconds: float
    seconds_per_token: float
    seconds_per_token2: float
    step_overhead_seconds: float = 0.0

    def chunk_seconds(self, num_sequences: int, padded_tokens: int) -> float:
        """Seconds of a padded chunk of `num_sequences` sequences of `padded_tokens` tokens each, on one stage."""
        tokens = num_sequences * padded_tokens
        return self.fixed_seconds + tokens * (self.seconds_per_token + self.seconds_per_token2 * padded_tokens)

    def sequence_seconds(self, num_tokens: int) -> float:
        """What one sequence of `num_tokens` computed tokens adds to a chunk, on one stage: b*l + c*l^2."""
        return num_tokens * (self.seconds_per_token + self.seconds_per_token2 * num_tokens)


@dataclass(frozen=True, slots=True)
class PrunedConfig:
    """A parallel configuration that cannot be used, with a reason that a person can read."""

    config: ParallelConfig
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """`num_replicas` equal replicas of one configuration."""

    config: ParallelConfig
    num_replicas: int


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of the base model on a contiguous block of ranks."""

    index: int
    config: ParallelConfig
    first_rank: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.config.num_gpus)


def replicas_of(groups: tuple[ReplicaGroup, ...]) -> tuple[Replica, ...]:
    """Replicas in rank order, group after group, equal replicas next to each other."""
    replicas: list[Replica] = []
    first_rank = 0
    for group in groups:
        for _ in range(group.num_replicas):
            replicas.append(Replica(len(replicas), group.config, first_rank))
            first_rank += group.config.num_gpus
    return tuple(replicas)


def plan_name(groups: tuple[ReplicaGroup, ...]) -> str:
    """Replica groups in a line: <8,1>x1 + <1,1>x8."""
    return " + ".join(f"{group.config}x{group.num_replicas}" for group in groups)


@dataclass(frozen=True, slots=True)
class PlanAlternative:
    """Another deployment that the planner weighed, with its mean step seconds on the sampled batches."""

    groups: tuple[ReplicaGroup, ...]
    predicted_step_seconds: float


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """How many replicas of which configuration; fixed until replanned.

    `predicted_step_seconds` is the mean makespan of the integer dispatcher over sampled batches,
    `lower_bound_seconds` bounds the expected makespan of any plan, `gap` = predicted / bound - 1.
    `bucket_uppers` are the ends of fixed buckets, empty where every step chooses its own. `caveat` says where the
    profile was not measured. `longest_alone_seconds` is the mean time of a step's longest sequence alone on the fastest
    configuration: no number of GPUs makes a step shorter.
    """

    groups: tuple[ReplicaGroup, ...]
    num_gpus: int
    predicted_step_seconds: float
    lower_bound_seconds: float
    solve_seconds: float
    tenant_gpu_seconds: dict[str, float]
    pruned: tuple[PrunedConfig, ...]
    alternatives: tuple[PlanAlternative, ...]
    bucket_uppers: tuple[int, ...] = ()
    caveat: str = ""
    longest_alone_seconds: float = 0.0

    @property
    def gap(self) -> float:
        return self.predicted_step_seconds / self.lower_bound_seconds - 1.0

    @property
    def num_used_gpus(self) -> int:
        return sum(group.num_replicas * group.config.num_gpus for group in self.groups)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Replicas in rank order; groups in the order of the plan, equal replicas next to each other."""
        return replicas_of(self.groups)

    def __str__(self) -> str:
        """The replicas, and what must be said wherever they are shown."""
        return plan_name(self.groups) + (f" [{self.caveat}]" if self.caveat else "")


@dataclass(frozen=True, slots=True, order=True)
class SequenceRef:
    """One sequence of one tenant: the row of its token file, and how long it is."""

    tenant: str
    row: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of `lower_tokens` < length <= `upper_tokens`, all padded to `upper_tokens`."""

    lower_tokens: int
    upper_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One micro-batch of one replica: sequences, each padded to `padded_tokens`, or, where that is None, packed."""

    sequences: tuple[SequenceRef, ...]
    padded_tokens: int | None

    @property
    def computed_lengths(self) -> tuple[int, ...]:
        """Tokens computed per sequence, in order."""
        if self.padded_tokens is None:
            return tuple(sequence.num_tokens for sequence in self.sequences)
        return (self.padded_tokens,) * len(self.sequences)

    @property
    def num_computed_tokens(self) -> int:
        return self.num_tokens if self.padded_tokens is None else len(self.sequences) * self.padded_tokens

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Which sequences go to which replica in one step, in which chunks.

    `chunks[r]` are replica r's chunks by falling seconds; `replica_seconds[r]` its predicted busy seconds;
    `lower_bound_seconds` the LP bound of this step.
    """

    chunks: tuple[tuple[Chunk, ...], ...]
    replica_seconds: tuple[float, ...]
    lower_bound_seconds: float
    buckets: tuple[Bucket, ...]

    @property
    def predicted_seconds(self) -> float:
        return max(self.replica_seconds)

    @property
    def padding_ratio(self) -> float:
        """Padding tokens / computed tokens, in [0, 1)."""
        computed = sum(chunk.num_computed_tokens for chunks in self.chunks for chunk in chunks)
        real = sum(chunk.num_tokens for chunks in self.chunks for chunk in chunks)
        return 1.0 - real / computed if computed else 0.0
