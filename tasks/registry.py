"""How adapters stand in MLflow's model registry. No mlflow here.

A tenant's adapters are the versions of one registered model, over all runs of an experiment. A version is made, and
the alias moved to it, only of an adapter that was trained to its end and passed its logits probe.
"""

import re
from collections.abc import Mapping
from typing import Any

from data_prep.names import folder_name
from training.config import BaseModelConfig, TenantConfig

TRAINED_AT = "trained_at"  # tag: ISO time (UTC) of the run's last step


def model_name(experiment: str, tenant: str) -> str:
    """`<experiment>.<tenant folder name>`, the same in every run; MLflow refuses slashes and colons."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', experiment)}.{folder_name(tenant)}"


def version_tags(tenant: TenantConfig, base_model: BaseModelConfig, summary: Mapping[str, Any]) -> dict[str, str]:
    """What a person wants to know of an adapter before serving it. `trained_at` orders the runs of a tenant."""
    totals = summary["tenants"][tenant.name]
    return {
        "tenant": tenant.name,
        "strategy": summary["strategy"],
        "plan": summary["plan"],
        "base_model": str(base_model.path),
        "rank": str(tenant.adapter.rank),
        "last_loss": str(totals["last_loss"]),
        "probe_effect": f"{totals['probe']['effect']:.3g}",
        "probe_error": f"{totals['probe']['error']:.1e}",
        TRAINED_AT: summary["trained_at"],
    }
