"""report.html: complete, readable without network or script, and safe with names that users choose."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from planning.config import Strategy
from planning.phase_file import phases_to_dict
from planning.strategies import Phase
from planning.types import DeploymentPlan, ParallelConfig, PrunedConfig, ReplicaGroup
from tasks.figures import padding_figure
from tasks.report import write_report
from tasks.run_folder import RunFolder, write_json
from tasks.summary import RunResults, TenantOutcome, skipped, summarise
from training.adapter_probe import ProbeResult
from training.journal import read_journal

EVIL = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Tags, references and the texts of table cells, row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.text = text
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row and row[0] == first)


@pytest.fixture
def page(step_record, journal, tmp_path: Path) -> Page:
    """The report of a run that lost a rank, left one tenant out and quarantined another."""
    launch = {"event": "launch", "step": 0, "time": 1.7e9, "overhead_gpu_seconds": 4.0}
    checkpoints = [
        {"event": "checkpoint", "step": step, "time": 1.7e9, "folder": f"step-{step}", "overhead_gpu_seconds": 0.5}
        for step in range(1, 6)
    ]
    records = journal(
        launch,
        *(step_record(step, tenants=("chat", EVIL)) for step in range(4)),
        {"event": "quarantined", "step": 3, "time": 1.7e9, "tenant": EVIL},
        {"event": "abort", "step": 3, "time": 1.7e9, "reason": "rank 1 was killed", "overhead_gpu_seconds": 1.0},
        launch,
        *checkpoints,
    )
    outcomes = {
        "chat": TenantOutcome("finished", "run/adapters/chat", "", ProbeResult(0.1, 2e-7)),
        EVIL: TenantOutcome("quarantined", None, "3 non-finite updates in a row"),
        "left": skipped("tenant 'left': no row is left"),
    }
    return written_page(records, outcomes, tmp_path)


def written_page(records: list[dict], outcomes: dict[str, TenantOutcome], tmp_path: Path) -> Page:
    """The report of a run with this journal in which the tenants ended so."""
    folder = RunFolder(tmp_path / "run")
    plan = DeploymentPlan(
        groups=(ReplicaGroup(ParallelConfig(1, 1), 2),),
        num_gpus=2,
        predicted_step_seconds=0.9,
        lower_bound_seconds=0.8,
        solve_seconds=0.1,
        tenant_gpu_seconds={"chat": 1.25, EVIL: 0.55},
        pruned=(PrunedConfig(ParallelConfig(4, 1), "tp 4 does not divide 2 kv heads"),),
        alternatives=(),
    )
    phases = (Phase(("chat", EVIL), plan),)
    data = [
        {"tenant": "chat", "num_rows": 90, "num_tokens": 4000, "num_rejects": 10, "reject_reasons": {"empty": 10}},
        {"tenant": "left", "failure": "tenant 'left': no row is left"},
    ]
    write_json(folder.config, {"name": "nightly", "planner": {}, "base_model": {"path": "models/base"}})
    write_json(folder.plan, phases_to_dict(phases))
    write_json(folder.prepared, {"schema_version": 1, "tenants": data})
    padding_figure([record for record in records if record["event"] == "step"], folder.figures / "padding.png")
    estimate = {"chat": 5.0, EVIL: 2.25}
    summary = summarise(RunResults(Strategy.LOBRA, phases, (), outcomes, read_journal(folder.steps), estimate))
    return Page(write_report(json.loads(json.dumps(summary)), folder).read_text())


def test_every_tenant_has_its_estimate_beside_its_bill_and_bad_ones_their_reason(page: Page) -> None:
    assert page.row("chat") == ["chat", "finished", "4", "400", "2.000 → 2.000", "5", "4", "33.3%", "2.0e-07"]
    assert page.row(EVIL)[1:3] == ["quarantined", "4"]
    assert page.row("left")[1] == "skipped"
    assert ["", "3 non-finite updates in a row"] in page.rows
    assert page.row("all")[5:7] == ["7.25", "12"]


def test_a_tenant_that_stopped_early_counts_as_finished_and_shows_its_lowest_evaluation_loss(
    step_record, journal, tmp_path: Path
) -> None:
    def evaluation(step: int, loss: float | None) -> dict:
        result = {"loss": loss, "perplexity": loss and 10.0, "num_supervised_tokens": 9, "tenant_step": step}
        return {"event": "evaluation", "step": step, "time": 1.7e9, "tenants": {"chat": result}}

    steps = [step_record(step, tenants=("chat",)) for step in range(3)]
    evaluations = [evaluation(step, loss) for step, loss in ((1, 2.5), (2, 2.25), (3, None))]
    records = [record for pair in zip(steps, evaluations, strict=True) for record in pair]
    outcome = TenantOutcome("stopped_early", "run/adapters/chat", "no better", ProbeResult(0.1, 2e-7), 2)
    page = written_page(journal(*records), {"chat": outcome}, tmp_path)
    row = page.row("chat")
    assert (row[1], row[5]) == ("stopped early", "2.250 (perplexity 10) at step 2")
    assert ["", "no better"] in page.rows
    assert "1 of 1" in page.text


def test_rejects_pruned_configurations_and_events_are_listed(page: Page) -> None:
    assert ["chat", "90", "4,000", "10", "empty: 10"] in page.rows
    assert ["left", "tenant 'left': no row is left"] in page.rows
    assert page.row("<4,1>")[1] == "tp 4 does not divide 2 kv heads"
    events = [row for row in page.rows if row and row[0].startswith("2023-")]
    names = [row[1] for row in events]
    assert names == ["launch", "quarantined", "abort", "launch", *["checkpoint"] * 3]
    assert events[2][2:] == ["3", "1", "rank 1 was killed"]


def test_the_page_needs_neither_network_nor_script_and_names_cannot_add_one(page: Page) -> None:
    assert "script" not in page.tags
    assert len(page.references) == 1
    assert page.references[0].startswith("data:image/png;base64,iVBOR")
