"""Who may work in a run folder, and on what."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planning.errors import InputError
from tasks.run_folder import RunFolderLockedError, open_run_folder, read_json

CONFIG = {"name": "a", "tenants": [{"name": "x", "adapter": {"rank": 4}}], "planner": {"num_buckets": 16}}


def test_an_unfinished_folder_of_the_same_configuration_resumes(tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "run", CONFIG, fresh=False) as folder:
        folder.plan.write_text("{}")
    with open_run_folder(tmp_path / "run", CONFIG, fresh=False) as folder:
        assert folder.plan.exists()


def test_another_configuration_is_refused_and_the_keys_are_named(tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "run", CONFIG, fresh=False) as folder:
        folder.steps.write_text("")
    other = json.loads(json.dumps(CONFIG))
    other["tenants"][0]["adapter"]["rank"] = 8
    other["planner"]["num_buckets"] = 4
    refused = open_run_folder(tmp_path / "run", other, fresh=False)
    with pytest.raises(InputError, match=r"planner\.num_buckets, tenants\[0\]\.adapter\.rank"), refused:
        pass
    with open_run_folder(tmp_path / "run", CONFIG, fresh=False) as folder:
        assert folder.steps.exists(), "the refusal took nothing away"


def test_fresh_sets_the_old_folder_aside(tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "run", CONFIG, fresh=False) as folder:
        folder.summary.write_text("{}")
    with open_run_folder(tmp_path / "run", {"name": "b"}, fresh=True) as folder:
        assert not folder.is_finished
    old = next(path for path in tmp_path.iterdir() if path.name.startswith("run."))
    assert (old / "summary.json").exists()


def test_bad_input_before_training_leaves_the_folder_open_to_another_configuration(tmp_path: Path) -> None:
    def fail() -> None:
        with open_run_folder(tmp_path / "run", CONFIG, fresh=False) as folder:
            folder.prepared.write_text("{}")
            raise InputError("no such column")

    with pytest.raises(InputError, match="no such column"):
        fail()
    with open_run_folder(tmp_path / "run", {"name": "b"}, fresh=False) as folder:
        assert not folder.prepared.exists()


def test_a_second_run_on_a_locked_folder_names_the_holder(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from tasks.run_folder import open_run_folder\n"
            "with open_run_folder(Path(sys.argv[1]), {}, fresh=False): print('held', flush=True); sys.stdin.read()",
            str(tmp_path / "run"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    refused = open_run_folder(tmp_path / "run", {}, fresh=False)
    with pytest.raises(RunFolderLockedError, match=f"process {holder.pid}"), refused:
        pass
    holder.stdin.close()
    assert holder.wait(10) == 0
    with open_run_folder(tmp_path / "run", {}, fresh=False):
        pass


def test_a_new_plan_may_change_where_a_run_trains_but_not_what(tmp_path: Path) -> None:
    config = {"planner": {"strategy": "lobra", "num_buckets": 16}, "cluster": {"num_gpus": 4}, "name": "run"}
    with open_run_folder(tmp_path / "run", config, fresh=False) as folder:
        for path in (folder.plan, folder.profile, folder.step_plans):
            path.write_text("{}")
    other = {**config, "cluster": {"num_gpus": 8}, "planner": {"strategy": "task_fused", "num_buckets": 8}}
    with (
        pytest.raises(InputError, match=r"differ: planner\.strategy\. Change them back to resume it, choose"),
        open_run_folder(tmp_path / "run", other, fresh=False, replan=True),
    ):
        pass
    other["planner"]["strategy"] = "lobra"
    with (
        pytest.raises(InputError, match=r"cluster\.num_gpus, planner\.num_buckets\. .*add --replan to go on"),
        open_run_folder(tmp_path / "run", other, fresh=False),
    ):
        pass
    assert folder.plan.exists()
    with open_run_folder(tmp_path / "run", other, fresh=False, replan=True):
        assert not any(path.exists() for path in (folder.plan, folder.profile, folder.step_plans))
        assert len(list(folder.path.glob("plans-until-*.jsonl"))) == 1
        assert read_json(folder.config) == other
    with pytest.raises(InputError, match="either --fresh or --replan"), open_run_folder(tmp_path, {}, True, True):
        pass
