"""Sends what a run has published to MLflow; may be repeated. No Prefect here: `lobra track` sends with it too."""

from collections.abc import Mapping, Sequence
from typing import Any

from data_prep.histogram import read_histogram
from tasks.registry import version_tags
from tasks.run_folder import RunFolder
from tasks.tracking import Tracker
from training.config import BaseModelConfig, TenantConfig

ADAPTER = "adapter"  # folder of a tenant's artifacts


def send_results(
    summary: Mapping[str, Any],
    tenants: Sequence[TenantConfig],
    base_model: BaseModelConfig,
    folder: RunFolder,
    tracker: Tracker,
) -> None:
    """Lengths, figures, report, the summary's numbers, and every published adapter as a registered version."""
    tracker.log_histogram(read_histogram(folder.histogram))
    for figure in sorted(folder.figures.glob("*.png")):
        tracker.log_file(figure, "figures")
    tracker.log_file(folder.report, "report")
    for tenant in tenants:
        if summary["tenants"][tenant.name]["adapter_path"] is not None:
            tracker.log_artifact_dir(tenant.name, folder.adapter(tenant.name), ADAPTER)
            tracker.register_adapter(tenant.name, ADAPTER, version_tags(tenant, base_model, summary))
    tracker.log_summary(summary)
