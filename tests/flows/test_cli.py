"""The command line: exit codes, and messages that name the field, file or row and the remedy."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flows.cli import main
from flows.config import read_run_file

REPOSITORY = Path(__file__).resolve().parents[2]
RunLobra = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def lobra(workspace: Path) -> RunLobra:
    """`lobra(*arguments)`: the command as a user runs it, in the test's own folder."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("lobra")), *arguments]
        environment = {**os.environ, "COLUMNS": "200"}
        return subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture
def lobra_here(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunLobra:
    """`lobra_here(*arguments)`: the same command in this process, which need not import everything anew."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["lobra", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        output, errors = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, int(end.value.code or 0), output, errors)

    return run


@pytest.fixture
def run_file(run_content: dict, workspace: Path) -> Callable[..., str]:
    """`run_file(change)`: writes the tiny run to run.yaml, after `change` has had it."""

    def write(change: Callable[[dict], None] = lambda _content: None) -> str:
        change(run_content)
        (workspace / "run.yaml").write_text(yaml.safe_dump(run_content))
        return "run.yaml"

    return write


def set_key(*path: str | int, value: object) -> Callable[[dict], None]:
    def change(content: dict) -> None:
        for part in path[:-1]:
            content = content[part]
        content[path[-1]] = value

    return change


def delete_key(*path: str | int) -> Callable[[dict], None]:
    def change(content: dict) -> None:
        for part in path[:-1]:
            content = content[part]
        del content[path[-1]]

    return change


def test_plan_prints_its_bound_gap_and_costs_as_json(lobra: RunLobra, run_file) -> None:
    result = lobra("plan", run_file(), "--json")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["plan"] == [{"tp": 2, "pp": 1, "replicas": 1}, {"tp": 1, "pp": 1, "replicas": 1}]
    assert plan["gap"] == pytest.approx(plan["predicted_step_seconds"] / plan["lower_bound_seconds"] - 1)
    assert set(plan["tenants"]) == {"short", "long"}
    assert sum(plan["tenants"].values()) == pytest.approx(plan["gpu_seconds_per_step"])
    assert {"tp": 1, "pp": 2} in [{"tp": p["tp"], "pp": p["pp"]} for p in plan["pruned"]]


def test_validate_counts_rows_tokens_and_rejects(lobra: RunLobra, run_file, workspace: Path) -> None:
    with (workspace / "short.jsonl").open("a") as file:
        file.write('{"prompt": "empty", "response": ""}\n')
    result = lobra("validate", run_file(set_key("tenants", 0, "dataset", "max_reject_ratio", value=0.2)))
    assert result.returncode == 0, result.stderr
    assert "empty" in result.stdout
    assert "All lengths fit" in result.stdout


def test_init_writes_a_run_file_that_parses_and_is_never_overwritten(lobra: RunLobra, workspace: Path) -> None:
    assert lobra("init", "mine.yaml").returncode == 0
    run = read_run_file(workspace / "mine.yaml")
    assert [tenant.name for tenant in run.tenants] == ["support-chat", "maths"]
    again = lobra("init", "mine.yaml")
    assert (again.returncode, "exists" in again.stderr) == (2, True)


def test_schema_describes_every_section(lobra: RunLobra) -> None:
    schema = json.loads(lobra("schema").stdout)
    assert set(schema["required"]) == {"name", "base_model", "tenants", "cluster", "profile"}
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("path", sorted((REPOSITORY / "infra/runs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_run_files_parse(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    if "tenants" in content and "dataset" in content["tenants"][0]:
        assert read_run_file(path).tenants


BAD_INPUT = {
    "unknown key": (set_key("cluster", "num_gpu", value=3), ["unknown key cluster.num_gpu", "did you mean num_gpus?"]),
    "unknown tenant key": (
        set_key("tenants", 1, "adapter", "rnk", value=3),
        ["unknown key tenants[1].adapter.rnk", "did you mean rank?"],
    ),
    "missing key": (delete_key("cluster", "num_gpus"), ["key cluster.num_gpus is missing"]),
    "wrong type": (set_key("cluster", "num_gpus", value="many"), ["cluster.num_gpus", "integer", "many"]),
    "rank 0": (set_key("tenants", 0, "adapter", "rank", value=0), ["tenants[0].adapter.rank", "greater than 0"]),
    "rank too large": (set_key("tenants", 0, "adapter", "rank", value=500), ["adapter.rank is 500", "at most 32"]),
    "negative learning rate": (
        set_key("tenants", 0, "optimiser", "learning_rate", value=-1.0),
        ["tenants[0].optimiser.learning_rate", "greater than 0"],
    ),
    "learning rate nan": (
        set_key("tenants", 0, "optimiser", "learning_rate", value=float("nan")),
        ["tenants[0].optimiser.learning_rate"],
    ),
    "warm-up of all steps": (
        set_key("tenants", 0, "optimiser", "warmup_steps", value=4),
        ["tenants[0]", "optimiser.warmup_steps is 4, but there are 4 steps", "lower it"],
    ),
    "warm-up of all epochs": (
        lambda content: content["tenants"][0].update(steps=None, epochs=1, optimiser={"warmup_steps": 3}),
        ["tenant 'short'", "warmup_steps is 3, but 1 epochs over 12 rows are 3 steps", "lower it"],
    ),
    "unknown schedule": (
        set_key("tenants", 0, "optimiser", "schedule", value="polynomial"),
        ["tenants[0].optimiser.schedule", "'constant', 'linear' or 'cosine'"],
    ),
    "no initial adapter": (
        set_key("tenants", 0, "adapter", "initial_adapter", value="nowhere"),
        ["tenant 'short': adapter.initial_adapter nowhere", "no such folder"],
    ),
    "unknown target": (
        set_key("tenants", 0, "adapter", "target_modules", value=["q_proj", "w1"]),
        ["unknown target module 'w1'", "choose from q_proj"],
    ),
    "embeddings as target": (
        set_key("tenants", 0, "adapter", "target_modules", value=["q_proj", "lm_head"]),
        ["target module 'lm_head' is not supported: embeddings stay frozen", "choose from q_proj"],
    ),
    "weight decay infinite": (
        set_key("tenants", 0, "optimiser", "weight_decay", value=float("inf")),
        ["tenants[0].optimiser.weight_decay", "finite"],
    ),
    "duplicate tenant": (set_key("tenants", 1, "name", value="short"), ["tenant 'short' is given twice"]),
    "steps and epochs": (set_key("tenants", 0, "epochs", value=1), ["tenants[0]", "either steps or epochs"]),
    "missing data file": (
        set_key("tenants", 0, "dataset", "path", value="none.jsonl"),
        ["tenant 'short'", "dataset.path: none.jsonl does not exist", "correct the path"],
    ),
    "data file is a folder": (set_key("tenants", 0, "dataset", "path", value="."), ["tenant 'short'", "dataset.path"]),
    "missing column": (
        set_key("tenants", 0, "dataset", "response_column", value="respons"),
        ["tenant 'short'", "respons", "response"],
    ),
    "no model": (set_key("base_model", "path", value="nowhere"), ["base_model.path nowhere", "no such folder"]),
    "measure without a profile": (set_key("profile", value={"source": "measure"}), ["no measured profile", "profile"]),
    "missing profile": (set_key("profile", "path", value="none.json"), ["none.json", "profile.path"]),
    "no memory": (
        lambda content: (
            content["cluster"].update(memory_per_gpu_gib=1e-6),
            content["profile"].update(path=without_memory_table(content["profile"]["path"])),
        ),
        ["<1,1>", "memory_per_gpu_gib"],
    ),
    "sequence longer than any replica holds": (
        lambda content: content["profile"].update(path=without_memory_table(content["profile"]["path"], tokens=40)),
        ["longest sequence has", "tenant long", "max_length <= 40"],
    ),
}


def without_memory_table(path: str, tokens: int | None = None) -> str:
    """A copy of the profile without largest chunks, or with `tokens` for all."""
    content = json.loads(Path(path).read_text())
    del content["max_chunk_tokens"]
    if tokens:
        content["max_chunk_tokens"] = [{"tp": tp, "pp": 1, "tokens": tokens} for tp in (1, 2)]
    Path("profile.json").write_text(json.dumps(content))
    return "profile.json"


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_exits_2_and_names_field_and_remedy(
    case: str, lobra_here: RunLobra, run_file, workspace: Path
) -> None:
    change, wanted = BAD_INPUT[case]
    result = lobra_here("plan", run_file(change))
    assert result.returncode == 2, result.stdout + result.stderr
    for words in wanted:
        assert words in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    assert not (workspace / "runs" / "tiny").exists()


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("", "holds no rows"),
        ('{"prompt": "a", "response": "b"}\n{"prompt": "a", "resp\n', "2"),
        ('{"prompt": "a", "response": ""}\n', "no row is left"),
        ("\xff\xfe\n", "UTF-8"),
    ],
    ids=["empty file", "malformed line", "all rows rejected", "not text"],
)
def test_bad_data_exits_2_and_names_the_row(
    content: str, wanted: str, lobra_here: RunLobra, run_file, workspace: Path
) -> None:
    (workspace / "short.jsonl").write_bytes(content.encode("latin-1"))
    result = lobra_here("validate", run_file())
    assert result.returncode == 2, result.stdout + result.stderr
    assert "tenant 'short'" in result.stderr
    assert wanted in result.stderr, result.stderr


def test_a_base_model_without_tokenizer_or_of_another_kind_is_refused(
    lobra_here: RunLobra, run_file, tiny_base: Path, workspace: Path
) -> None:
    copy = workspace / "model"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((tiny_base / name).read_bytes())
    result = lobra_here("plan", run_file(set_key("base_model", "path", value="model")))
    assert (result.returncode, "tokenizer" in result.stderr) == (2, True), result.stderr
    (copy / "config.json").write_text('{"model_type": "gpt2"}')
    result = lobra_here("plan", "run.yaml")
    assert (result.returncode, "'gpt2' is not supported" in result.stderr) == (2, True), result.stderr


def test_data_outside_the_allowed_folders_is_refused(
    lobra_here: RunLobra, run_file, monkeypatch, workspace: Path
) -> None:
    (workspace / "allowed").mkdir()
    monkeypatch.setenv("LOBRA_DATA_ROOTS", str(workspace / "allowed"))
    (workspace / "allowed" / "sneaky").symlink_to(workspace)
    result = lobra_here("plan", run_file(set_key("base_model", "path", value="allowed/sneaky")))
    assert result.returncode == 2
    assert "base_model.path: allowed/sneaky lies outside the allowed folders" in result.stderr


def test_an_initial_adapter_outside_the_allowed_folders_is_refused(
    lobra_here: RunLobra, run_file, tiny_base: Path, monkeypatch, workspace: Path
) -> None:
    roots = (tiny_base, workspace / "short.jsonl", workspace / "inside")
    monkeypatch.setenv("LOBRA_DATA_ROOTS", os.pathsep.join(map(str, roots)))
    (workspace / "inside").mkdir()
    (workspace / "inside" / "adapter_model.safetensors").symlink_to(workspace / "long.jsonl")
    result = lobra_here("plan", run_file(set_key("tenants", 0, "adapter", "initial_adapter", value="inside")))
    assert result.returncode == 2
    wanted = "tenants[0] (short).adapter.initial_adapter: inside/adapter_model.safetensors lies outside"
    assert wanted in result.stderr, result.stderr


def test_status_of_a_folder_that_is_none_is_refused(lobra_here: RunLobra, workspace: Path) -> None:
    result = lobra_here("status", str(workspace))
    assert (result.returncode, "not a run folder" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("strategies", "wanted"),
    [("lobra", "at least two"), ("lobra,fused", "'fused' in 'fused' is unknown; choose from lobra")],
)
def test_compare_refuses_strategies_that_it_cannot_compare(
    strategies: str, wanted: str, lobra_here: RunLobra, run_file
) -> None:
    result = lobra_here("compare", run_file(), "--strategies", strategies)
    assert (result.returncode, wanted in result.stderr) == (2, True), result.stderr


def test_gc_says_what_it_frees_and_removes_it_only_without_dry_run(lobra: RunLobra, workspace: Path) -> None:
    folder = workspace / "runs" / "old"
    folder.mkdir(parents=True)
    for name in ("config.json", "summary.json"):
        (folder / name).write_text("{}")
    shown = lobra("gc", "--keep-days", "0", "--dry-run")
    assert (shown.returncode, "Would free 0.0 MiB in 1 folders" in shown.stdout) == (0, True), shown.stderr
    assert folder.exists()
    assert "Freed 0.0 MiB in 1 folders" in lobra("gc", "--keep-days", "0").stdout
    assert not folder.exists()
    assert lobra("gc", "--keep-days", "0", "--runs", "nowhere").returncode == 2


@pytest.mark.parametrize("command", ["export", "merge"])
def test_an_adapter_of_no_run_is_refused(command: str, lobra_here: RunLobra) -> None:
    result = lobra_here(command, "nowhere", "short", "out")
    assert (result.returncode, "nowhere: not a run folder" in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["schema"], ["plan", "run.yaml"], ["validate", "run.yaml"], ["gc", "--keep-days", "1", "--runs", "."]],
)
def test_light_commands_import_neither_prefect_nor_mlflow_nor_torch(
    arguments: list[str], run_file, workspace: Path
) -> None:
    run_file()
    code = (
        "import sys; from flows.cli import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'prefect', 'mlflow', 'torch', 'megatron'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=workspace, capture_output=True, text=True, timeout=120)
    assert "heavy: []" in result.stdout, result.stdout + result.stderr
