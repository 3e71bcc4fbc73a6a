"""When a tenant is evaluated, which adapter is its best, and when it has stopped improving."""

from dataclasses import asdict

import pytest
from pydantic import ValidationError

from training.config import EvaluationConfig, TenantConfig
from training.evaluation_history import EvaluationHistory
from training.progress import RunProgress, TenantProgress, TenantStatus

EVERY_TWO = EvaluationConfig(every=2)


def histories(losses: list[float | None], min_delta: float = 0.0) -> list[EvaluationHistory]:
    history, seen = EvaluationHistory(), []
    for number, loss in enumerate(losses, 1):
        history = history.after(number, loss, min_delta)
        seen.append(history)
    return seen


def test_the_best_is_the_lowest_loss_and_the_first_of_equals() -> None:
    last = histories([3.0, 2.0, 2.5, 2.0])[-1]
    assert (last.best_loss, last.best_step, last.num_stale) == (2.0, 2, 2)
    assert [history.is_at_best for history in histories([3.0, 2.0, 2.5, 2.0])] == [True, True, False, False]


def test_small_steps_count_as_an_improvement_once_they_add_up_and_are_the_best_before() -> None:
    seen = histories([3.0, 2.95, 2.9, 2.85], min_delta=0.125)
    assert [history.num_stale for history in seen] == [0, 1, 2, 0]
    assert [history.best_step for history in seen] == [1, 2, 3, 4]


def test_a_loss_that_is_not_finite_is_no_improvement_and_never_the_best() -> None:
    seen = histories([None, 2.0, None])
    assert [history.num_stale for history in seen] == [1, 0, 1]
    assert not seen[0].is_at_best
    assert (seen[-1].best_step, seen[-1].last_loss) == (2, None)


def test_a_tenant_is_due_every_few_steps_and_at_its_last_one_and_once_only() -> None:
    progress, due = TenantProgress(num_steps=5), []
    for step in range(1, 6):
        progress = progress.after_step(False, 3)
        if progress.is_due(EVERY_TWO):
            due.append(step)
            assert not progress.is_publishable(EVERY_TWO)
            progress = progress.after_evaluation(1.0, EVERY_TWO)
            assert not progress.is_due(EVERY_TWO)
    assert due == [2, 4, 5]
    assert progress.is_publishable(EVERY_TWO)
    assert not TenantProgress(5, num_done=2, status=TenantStatus.QUARANTINED).is_due(EVERY_TWO)


@pytest.mark.parametrize(("publish", "step"), [("best", 2), ("last", 6)])
def test_patience_ends_a_tenant_and_says_why_and_the_adapter_asked_for_is_published(publish: str, step: int) -> None:
    config = EvaluationConfig(every=2, patience=2, publish=publish)
    progress = TenantProgress(num_steps=20, num_done=2).after_evaluation(2.0, config)
    for num_done in (4, 6):
        assert progress.status is TenantStatus.RUNNING
        progress = TenantProgress(20, num_done, evaluations=progress.evaluations).after_evaluation(2.5, config)
    assert progress.status is TenantStatus.STOPPED_EARLY
    assert progress.status.is_success
    assert progress.reason == "evaluation loss did not improve in 2 evaluations; the best was 2 after step 2"
    assert progress.published_step(config) == step
    assert progress.num_steps_in_all == 6
    assert not progress.is_active(6)


def test_the_last_evaluation_leaves_a_finished_tenant_finished() -> None:
    config = EvaluationConfig(every=1, patience=1)
    progress = TenantProgress(2, 1).after_evaluation(2.0, config).after_step(False, 3).after_evaluation(3.0, config)
    assert progress.status is TenantStatus.FINISHED
    assert progress.evaluations.num_stale == 1


def test_progress_with_its_evaluations_survives_a_checkpoint_and_older_checkpoints_have_none() -> None:
    progress = RunProgress({"t": TenantProgress(9, 3).after_evaluation(0.1 + 0.2, EvaluationConfig(every=3))}, step=3)
    content = progress.to_dict()
    assert RunProgress.from_dict(content) == progress
    del content["tenants"]["t"]["evaluations"]
    assert RunProgress.from_dict(content).tenants["t"].evaluations == EvaluationHistory()
    assert asdict(progress)["tenants"]["t"]["evaluations"]["best_loss"] == 0.1 + 0.2


def tenant(evaluation: dict, ratio: float) -> TenantConfig:
    dataset = {"path": "a.jsonl", "prompt_column": "p", "response_column": "r", "evaluation_ratio": ratio}
    adapter = {"rank": 2, "alpha": 4}
    return TenantConfig(name="t", dataset=dataset, adapter=adapter, batch_size=1, steps=4, evaluation=evaluation)


@pytest.mark.parametrize(
    ("evaluation", "ratio", "message"),
    [
        ({"every": 2}, 0.0, r"tenant 't': evaluation needs rows.*set dataset\.evaluation_ratio"),
        ({"every": 0}, 0.1, "greater than 0"),
        ({"every": 2, "patience": 0}, 0.1, "greater than 0"),
        ({"every": 2, "min_delta": 0.1}, 0.1, "min_delta has no effect without patience"),
        ({"every": 2, "patience": 1, "min_delta": float("inf")}, 0.1, "finite"),
        ({"every": 2, "publish": "first"}, 0.1, "'best' or 'last'"),
        ({"patience": 2}, 0.1, "every"),
    ],
)
def test_a_bad_evaluation_section_is_refused_with_its_remedy(evaluation: dict, ratio: float, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tenant(evaluation, ratio)
    assert tenant({"every": 2, "patience": 3, "min_delta": 0.01}, 0.1).evaluation is not None
