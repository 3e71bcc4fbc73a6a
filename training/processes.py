"""Joining the fleet: a client of the controller's store."""

from datetime import timedelta

import torch.distributed as dist

FOREVER = timedelta(days=365)  # a wait in the store ends sooner: with what is waited for, or with the store


def connect_store(host: str, port: int, generation: int, timeout_seconds: float = 60.0) -> dist.Store:
    """A client of the controller's store, seeing only the keys of one launch."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.PrefixStore(f"generation-{generation}", dist.TCPStore(host, port, is_master=False, timeout=timeout))
