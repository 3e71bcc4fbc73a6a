"""The step plan: what the controller publishes and the workers execute (DESIGN.md, "One step").

A step is an ordered list of waves of jobs. A job names its member replicas and their chunks and is one pipeline flush.
Today a step is one wave, and each job has one member. Only indices travel; the format is JSON, `schema_version` 1.
`padded_tokens` is null for a packed chunk.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planning.errors import PlanError
from planning.types import Candidate, Chunk, Dispatch, ParallelConfig, Replica, SequenceRef

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class JobMember:
    """One replica and the chunks it computes, in order."""

    replica: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One pipeline flush."""

    members: tuple[JobMember, ...]


@dataclass(frozen=True, slots=True)
class Wave:
    """Jobs that run at the same time, on different replicas."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `supervised_tokens` is each tenant's loss denominator over the whole step."""

    step: int
    waves: tuple[Wave, ...]
    supervised_tokens: dict[str, int]

    def chunks_of(self, replica: int) -> tuple[Chunk, ...]:
        """What a replica computes, in order."""
        jobs = [job for wave in self.waves for job in wave.jobs]
        members = [member for job in jobs for member in job.members if member.replica == replica]
        return tuple(chunk for member in members for chunk in member.chunks)

    def to_json(self) -> str:
        """One line of JSON; a sequence is `[tenant, row, num_tokens]`."""
        waves = [
            {"jobs": [{"members": [_member_to_dict(member) for member in job.members]} for job in wave.jobs]}
            for wave in self.waves
        ]
        plan = {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "supervised_tokens": self.supervised_tokens,
            "waves": waves,
        }
        return json.dumps(plan, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "StepPlan":
        """The inverse of `to_json`. Raises PlanError when the text is no step plan of this version."""
        try:
            plan = json.loads(text)
            if plan["schema_version"] != SCHEMA_VERSION:
                raise PlanError(
                    f"step plan has schema_version {plan['schema_version']}, this program reads {SCHEMA_VERSION}; "
                    "run controller and workers from the same release"
                )
            waves = tuple(
                Wave(tuple(Job(tuple(_member_from_dict(member) for member in job["members"])) for job in wave["jobs"]))
                for wave in plan["waves"]
            )
            supervised = {str(tenant): int(tokens) for tenant, tokens in plan["supervised_tokens"].items()}
            return cls(int(plan["step"]), waves, supervised)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"step plan is damaged: {type(error).__name__} {error}; publish the step again") from error


def step_plan_from(step: int, dispatch: Dispatch, supervised_tokens: dict[str, int]) -> StepPlan:
    """One wave with one job per replica that has chunks; without any chunk, no wave."""
    jobs = tuple(Job((JobMember(replica, chunks),)) for replica, chunks in enumerate(dispatch.chunks) if chunks)
    return StepPlan(step, (Wave(jobs),) if jobs else (), supervised_tokens)


def check_plan(
    plan: StepPlan,
    sequences: Sequence[SequenceRef],
    replicas: Sequence[Replica],
    candidates: Mapping[ParallelConfig, Candidate],
) -> None:
    """Raises PlanError unless each sequence is computed exactly once, within the replicas' capacities.

    Also rejects an unknown replica, a replica twice in a wave, an empty chunk, and a chunk shorter than a sequence.
    """
    replica_of = {replica.index: replica for replica in replicas}
    planned: Counter[SequenceRef] = Counter()
    for number, wave in enumerate(plan.waves):
        busy: set[int] = set()
        for member in (member for job in wave.jobs for member in job.members):
            if member.replica not in replica_of:
                raise PlanError(f"step {plan.step}: replica {member.replica} is unknown; there are {len(replicas)}")
            if member.replica in busy:
                raise PlanError(f"step {plan.step}: replica {member.replica} stands twice in wave {number}")
            busy.add(member.replica)
            candidate = candidates[replica_of[member.replica].config]
            for chunk in member.chunks:
                _check_chunk(chunk, candidate, f"step {plan.step}, replica {member.replica}")
                planned.update(chunk.sequences)
    _check_sequences(planned, Counter(sequences), f"step {plan.step}")


def _check_chunk(chunk: Chunk, candidate: Candidate, where: str) -> None:
    if not chunk.sequences:
        raise PlanError(f"{where}: a chunk of {chunk.padded_tokens} tokens holds no sequence")
    if chunk.num_computed_tokens > candidate.max_chunk_tokens:
        shape = "packed" if chunk.padded_tokens is None else f"{len(chunk.sequences)} x {chunk.padded_tokens}"
        raise PlanError(
            f"{where}: a chunk of {chunk.num_computed_tokens} tokens ({shape}) exceeds the "
            f"{candidate.max_chunk_tokens} tokens that {candidate.config} holds"
        )
    for sequence, num_tokens in zip(chunk.sequences, chunk.computed_lengths, strict=True):
        if sequence.num_tokens > num_tokens:
            raise PlanError(f"{where}: {_name(sequence)} does not fit into a chunk of {num_tokens} tokens")


def _check_sequences(planned: Counter[SequenceRef], wanted: Counter[SequenceRef], where: str) -> None:
    for sequence in sorted(planned.keys() | wanted.keys()):
        if sequence not in wanted:
            raise PlanError(f"{where}: {_name(sequence)} is planned but not part of the step")
        if sequence not in planned:
            raise PlanError(f"{where}: {_name(sequence)} is missing from the plan")
        if planned[sequence] != wanted[sequence]:
            raise PlanError(f"{where}: {_name(sequence)} is planned {planned[sequence]} times")


def _name(sequence: SequenceRef) -> str:
    return f"tenant {sequence.tenant}, row {sequence.row} ({sequence.num_tokens} tokens)"


def _member_to_dict(member: JobMember) -> dict[str, object]:
    chunks = [
        {"padded_tokens": chunk.padded_tokens, "sequences": [[s.tenant, s.row, s.num_tokens] for s in chunk.sequences]}
        for chunk in member.chunks
    ]
    return {"replica": member.replica, "chunks": chunks}


def _member_from_dict(member: Any) -> JobMember:
    chunks = tuple(
        Chunk(
            tuple(SequenceRef(str(tenant), int(row), int(tokens)) for tenant, row, tokens in chunk["sequences"]),
            None if chunk["padded_tokens"] is None else int(chunk["padded_tokens"]),
        )
        for chunk in member["chunks"]
    )
    return JobMember(int(member["replica"]), chunks)
