"""Node agent: imports the training stack once, forks this node's ranks, and ends them when anything is wrong.

The controller starts it as `python -m training.agent` with the fields of `AgentArguments` as arguments. The agent dies
with the controller; ranks die with the agent. A controller that lives but no longer beats (10 s) counts as dead. When a
rank ends without a word, the agent reports it; then it kills the others, which would wait for it for ever.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass

import torch

from training import worker
from training.fleet_spec import DEATH_KEY, FAILURE_KEY, HEARTBEAT_KEY, HEARTBEAT_LOST_SECONDS
from training.parent_death import die_with_parent
from training.processes import connect_store

POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class AgentArguments:
    """Where the controller and its store are, which launch this is, and the ranks of this node (inclusive)."""

    host: str
    port: int
    controller_pid: int
    generation: int
    first_rank: int
    last_rank: int


def _fork_rank(arguments: AgentArguments, rank: int) -> int:
    agent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with_parent(agent_pid)
    code = worker.run_rank(arguments.host, arguments.port, arguments.generation, rank, rank - arguments.first_rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Heartbeat:
    """Tells whether the controller's counter has moved within the allowed time."""

    def __init__(self) -> None:
        self.value = b""
        self.seen = time.monotonic()

    def is_lost(self, value: bytes) -> bool:
        now = time.monotonic()
        if value != self.value:
            self.value, self.seen = value, now
        return now - self.seen > HEARTBEAT_LOST_SECONDS


def supervise(arguments: AgentArguments, ranks: dict[int, int]) -> int:
    """Wait until all ranks (pid -> rank) ended well, or end them all. Returns the agent's exit code."""
    try:
        store = connect_store(arguments.host, arguments.port, arguments.generation)
        heartbeat = _Heartbeat()
        while ranks:
            ended = _reap(ranks)
            if any(ended.values()):
                _report_exits(store, ended)
                return 1
            if store.check([HEARTBEAT_KEY]) and heartbeat.is_lost(store.get(HEARTBEAT_KEY)):
                return 1
            time.sleep(POLL_SECONDS)
    except (torch.distributed.DistError, RuntimeError):
        return 1  # the store is gone, and with it the controller
    else:
        return 0
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)


def _reap(ranks: dict[int, int]) -> dict[int, int]:
    """Take all ended processes out of `ranks` (pid -> rank); returns rank -> exit code, negative for a signal."""
    ended = {}
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        ended[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
    return ended


def _report_exits(store: torch.distributed.Store, ended: dict[int, int]) -> None:
    """Report the endings that ranks could not report themselves. A killed rank is the cause of its peers' failures."""
    for rank, code in sorted(ended.items(), key=lambda item: item[1]):
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        key = DEATH_KEY if code < 0 else FAILURE_KEY
        store.compare_set(key, "", json.dumps({"rank": rank, "message": f"rank {rank} {cause}"}))


def main() -> None:
    host, *numbers = sys.argv[1:]
    arguments = AgentArguments(host, *map(int, numbers))
    die_with_parent(arguments.controller_pid)
    torch.set_num_threads(1)
    ranks = {}
    for rank in range(arguments.first_rank, arguments.last_rank + 1):
        ranks[_fork_rank(arguments, rank)] = rank
    sys.exit(supervise(arguments, ranks))


if __name__ == "__main__":
    main()
