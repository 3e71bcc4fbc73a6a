"""`control.json` in a run folder: what an operator asks of a run under way.

    {"cancel": ["tenant name", ...]}

Read before every step. A file that is not understood changes nothing.
"""

import json
import logging
from collections.abc import Collection
from pathlib import Path

logger = logging.getLogger(__name__)


def cancelled_tenants(path: Path, known: Collection[str]) -> tuple[str, ...]:
    """Known tenants that the file asks to take out; none without a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        logger.warning('%s is not read: %s; write {"cancel": ["tenant"]}', path, error)
        return ()
    asked = content.get("cancel", []) if isinstance(content, dict) else None
    if not isinstance(asked, list) or set(map(str, asked)) - set(known):
        logger.warning("%s: cancel must list tenants of this run (%s), got %r", path, ", ".join(sorted(known)), asked)
        return ()
    return tuple(asked)
