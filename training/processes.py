"""Parent-child ties of the fleet's processes, and joining its world."""

import ctypes
import os
import signal
from datetime import timedelta

import torch.distributed as dist

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL this process when the thread that started it ends (Linux); exit at once if the parent is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def connect_store(host: str, port: int, generation: int, timeout_seconds: float = 60.0) -> dist.Store:
    """A client of the controller's store, seeing only the keys of one launch."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.PrefixStore(f"generation-{generation}", dist.TCPStore(host, port, is_master=False, timeout=timeout))
