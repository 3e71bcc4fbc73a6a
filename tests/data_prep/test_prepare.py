import json
import pickle
import stat

import polars as pl
import pytest
from distributed import LocalCluster
from transformers import PreTrainedTokenizerFast

from data_prep import prepare
from data_prep.errors import DatasetError
from data_prep.files import file_sha256
from data_prep.prepare import PreparedTenant, PrepareRequest, TenantFailure, prepare_tenant, prepare_tenants
from data_prep.token_file import TokenFile
from planning.errors import InputError

GOOD = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}."} for i in range(40)]
SECRET = "hunter2"


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)


def test_a_tenant_is_prepared_with_exact_counts_and_private_files(request_for, jsonl, tmp_path):
    path = jsonl([*GOOD, "{broken", {"question": SECRET, "answer": ""}])
    done = prepare_tenant(request_for(path, tenant="Ann & Co", max_reject_ratio=0.05))
    assert (done.num_rows, done.num_rejects) == (40, 2)
    assert done.reject_reasons == {"malformed JSON": 1, "empty response (column 'answer')": 1}
    tokens = TokenFile(done.token_path)
    assert tokens.num_rows == 40
    assert done.num_tokens == tokens.num_tokens.sum()
    assert done.sha256 == file_sha256(done.token_path)
    rejects = pl.read_parquet(done.rejects_path)
    assert rejects.columns == ["file", "row", "reason", "snippet"]
    assert rejects["row"].to_list() == [41, 42]
    assert rejects["file"].unique().to_list() == [str(path)]
    assert SECRET in rejects["snippet"][1]
    assert done.rejects_path.parent == tmp_path / "run" / "rejects"
    assert done.rejects_path.name.startswith("ann-co-")
    for folder in (done.token_path.parent, done.rejects_path.parent, tmp_path / "run"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in (done.token_path, done.rejects_path):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_requests_and_results_survive_json_and_pickle(request_for, jsonl):
    request = request_for(jsonl(GOOD), max_length=500, overlong="error")
    done = prepare_tenant(request)
    assert PrepareRequest.from_dict(json.loads(json.dumps(request.to_dict()))) == request
    assert PreparedTenant.from_dict(json.loads(json.dumps(done.to_dict()))) == done
    assert pickle.loads(pickle.dumps((request, done))) == (request, done)


def test_unchanged_input_is_reused_and_gives_the_same_rejects(request_for, jsonl):
    path = jsonl([*GOOD, "{broken"])
    first = prepare_tenant(request_for(path, "ann", max_reject_ratio=0.05))
    written = first.token_path.stat().st_mtime_ns
    moved = jsonl([*GOOD, "{broken"], "moved.jsonl")
    second = prepare_tenant(request_for(moved, "bob", max_reject_ratio=0.1, max_drop_ratio=0.0))
    assert second.token_path == first.token_path
    assert second.token_path.stat().st_mtime_ns == written
    assert second.reject_reasons == first.reject_reasons
    rejects = [pl.read_parquet(done.rejects_path) for done in (first, second)]
    assert rejects[0].drop("file").equals(rejects[1].drop("file"))
    assert rejects[1]["file"].to_list() == [str(moved)]


def test_a_changed_file_tokenizer_template_or_setting_is_prepared_anew(
    request_for, jsonl, changed_tokenizer, tokenizer_folder
):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = jsonl([{"messages": messages}])
    base = request_for(path, messages_column="messages")
    first = prepare_tenant(base)
    paths = {first.token_path}
    paths.add(prepare_tenant(request_for(path, messages_column="messages", max_length=99)).token_path)
    template = (tokenizer_folder / "chat_template.jinja").read_text() + "!"
    for folder in (changed_tokenizer(template), changed_tokenizer(bos_token="</s>")):
        paths.add(prepare_tenant(request_for(path, messages_column="messages", folder=folder)).token_path)
    path.write_text(path.read_text().replace('"b"', '"c"'))
    changed = prepare_tenant(base)
    assert len(paths | {changed.token_path}) == 5
    assert changed.sha256 != first.sha256


@pytest.mark.parametrize("name", ["tokens.arrow", "evaluation.arrow", "rejects.parquet", "manifest.json"])
@pytest.mark.parametrize("damage", [b"", b"rubbish", None])
def test_a_damaged_or_incomplete_cache_entry_is_built_anew(request_for, jsonl, name, damage):
    request = request_for(jsonl([*GOOD, "{broken"]), max_reject_ratio=0.05)
    first = prepare_tenant(request)
    victim = first.token_path.parent / name
    victim.unlink() if damage is None else victim.write_bytes(damage)
    assert prepare_tenant(request) == first
    assert file_sha256(first.token_path) == first.sha256


def test_too_many_rejects_stop_the_tenant_with_counts_rows_and_remedy_but_no_text(request_for, jsonl):
    bad = {"question": SECRET, "answer": ""}
    path = jsonl([GOOD[0], bad, bad, bad, bad, f'{{"question": "{SECRET}'])
    with pytest.raises(DatasetError) as caught:
        prepare_tenant(request_for(path, max_reject_ratio=0.8))
    message = str(caught.value)
    assert message.startswith("tenant 'ann': 5 of 6 rows of ")
    assert "dataset.max_reject_ratio 0.8" in message
    assert "4 x empty response (column 'answer') (first rows: 2, 3, 4); 1 x malformed JSON (first rows: 6)" in message
    rejects = pl.read_parquet(message.split("see ")[1].split(", or raise")[0])
    assert rejects["row"].to_list() == [2, 3, 4, 5, 6]
    assert SECRET not in message
    assert prepare_tenant(request_for(path, max_reject_ratio=5 / 6)).num_rows == 1


def test_one_malformed_line_is_an_error_with_its_number_and_the_remedy_unless_it_is_allowed(request_for, jsonl):
    path = jsonl([*GOOD, "{broken", *GOOD])
    with pytest.raises(
        DatasetError, match=r"1 of 81 rows .* 1 x malformed JSON \(first rows: 41\); repair .* or raise"
    ):
        prepare_tenant(request_for(path))
    assert prepare_tenant(request_for(path, max_reject_ratio=0.02)).reject_reasons == {"malformed JSON": 1}


def test_overlong_rows_have_a_limit_of_their_own(request_for, jsonl):
    path = jsonl([*GOOD, {"question": "x" * 500, "answer": "y"}, {"question": "x" * 500, "answer": "y"}])
    assert prepare_tenant(request_for(path, max_length=100)).reject_reasons == {"longer than dataset.max_length": 2}
    with pytest.raises(DatasetError) as caught:
        prepare_tenant(request_for(path, max_length=100, max_drop_ratio=0.04))
    message = str(caught.value)
    assert "2 of 42 rows of " in message
    assert "are longer than dataset.max_length 100, more than dataset.max_drop_ratio 0.04 allows" in message
    assert message.endswith("or raise dataset.max_length or dataset.max_drop_ratio")


def test_prompts_that_fill_max_length_are_dropped_counted_and_the_tenant_fails_alone(request_for, jsonl):
    full = request_for(jsonl(GOOD), "ann", max_length=3, max_reject_ratio=1.0)
    fine = request_for(jsonl(GOOD), "bob")
    failure, done = prepare_tenants([full, fine], num_workers=0)
    assert isinstance(failure, TenantFailure)
    assert "no row is left: 40 x longer than dataset.max_length" in failure.reason
    assert isinstance(done, PreparedTenant)


def test_input_errors_name_the_tenant_and_leave_nothing_half_written(request_for, jsonl, tmp_path):
    with pytest.raises(DatasetError, match=r"^tenant 'ann': dataset\.path: .*none\.jsonl does not exist"):
        prepare_tenant(request_for(tmp_path / "none.jsonl"))
    with pytest.raises(DatasetError, match=r"^tenant 'ann': dataset\.response_column: .* nearest is 'answer'"):
        prepare_tenant(request_for(jsonl(GOOD), response_column="anser"))
    with pytest.raises(DatasetError, match=r"^tenant 'ann': row 1 of"):
        prepare_tenant(request_for(jsonl(GOOD), max_length=3, overlong="error"))
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_an_assistant_only_loss_without_markers_is_refused_where_turns_cannot_be_located(
    request_for, jsonl, changed_tokenizer
):
    folder = changed_tokenizer("{% for m in messages %}{{ messages | length }} {{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    request = request_for(jsonl([{"messages": messages}]), folder=folder, messages_column="messages")
    with pytest.raises(DatasetError, match=r"no row is left.*mark them with \{% generation %\}"):
        prepare_tenant(request)


def test_dask_processes_write_the_same_files_as_this_process(request_for, jsonl):
    paths = [jsonl([*GOOD[i:], "{broken"], f"{i}.jsonl") for i in range(3)]
    here = [request_for(path, f"tenant {i}", cache="here", max_reject_ratio=0.05) for i, path in enumerate(paths)]
    there = [request_for(path, f"tenant {i}", cache="there", max_reject_ratio=0.05) for i, path in enumerate(paths)]
    bad = request_for(paths[0].with_name("none.jsonl"), "bad", cache="there")
    seen = []
    expected = prepare_tenants(here, num_workers=0)
    failure, *actual = prepare_tenants([bad, *there], num_workers=2, on_done=seen.append)
    assert isinstance(failure, TenantFailure)
    assert "does not exist" in failure.reason
    assert [done.sha256 for done in actual] == [done.sha256 for done in expected]
    assert [done.tenant for done in actual] == ["tenant 0", "tenant 1", "tenant 2"]
    assert all("there" in done.token_path.parts for done in actual)
    for one, other in zip(expected, actual, strict=True):
        assert one.token_path.read_bytes() == other.token_path.read_bytes()
    assert sorted(done.tenant for done in seen) == ["bad", "tenant 0", "tenant 1", "tenant 2"]


def test_the_cluster_named_in_the_environment_is_used(request_for, jsonl, monkeypatch):
    with LocalCluster(
        n_workers=1, processes=False, protocol="tcp", host="127.0.0.1", dashboard_address=None
    ) as cluster:
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", cluster.scheduler_address)
        (done,) = prepare_tenants([request_for(jsonl(GOOD))], num_workers=0)
        assert isinstance(done, PreparedTenant)


def test_the_callback_sees_each_tenant_as_it_completes(request_for, jsonl, tmp_path):
    seen = []
    requests = [request_for(jsonl(GOOD), "ann"), request_for(tmp_path / "none", "bob")]
    assert prepare_tenants(requests, num_workers=0, on_done=seen.append) == seen
    assert [type(outcome) for outcome in seen] == [PreparedTenant, TenantFailure]


def test_a_programming_error_is_not_taken_for_a_bad_tenant(request_for, jsonl):
    request = request_for(jsonl(GOOD))
    broken = PrepareRequest(request.tenant, None, *list(request.to_dict().values())[2:])
    with pytest.raises(AttributeError):
        prepare_tenants([broken], num_workers=0)


def test_real_questions_and_answers_prepare_completely(request_for, real_data, tokenizer_folder):
    path = real_data / "gsm8k" / "train.jsonl"
    done = prepare_tenant(request_for(path))
    assert (done.num_rows, done.num_rejects) == (5387, 0)
    tokens = TokenFile(done.token_path)
    oracle = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 5387
    for index in range(0, 5387, 97):
        row = tokens.row(index)
        ((start, end),) = row.loss_spans
        assert oracle.decode(row.input_ids[:start].tolist()) == "<s>" + rows[index]["question"]
        assert oracle.decode(row.input_ids[start:end].tolist()) == rows[index]["answer"] + "</s>"
        assert end == len(row.input_ids)


@pytest.mark.parametrize("marked", [True, False])
def test_real_conversations_prepare_completely_with_loss_on_what_the_assistant_says(
    request_for, real_data, tokenizer_folder, changed_tokenizer, chatml, marked
):
    path = real_data / "tinker_conversations" / "conversations.jsonl"
    folder = tokenizer_folder if marked else changed_tokenizer(chatml)
    done = prepare_tenant(request_for(path, messages_column="messages", folder=folder))
    assert (done.num_rows, done.num_rejects) == (128, 0)
    tokens = TokenFile(done.token_path)
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    for index, line in enumerate(path.read_text().splitlines()):
        messages = json.loads(line)["messages"]
        row = tokens.row(index)
        assert row.input_ids.tolist() == oracle.apply_chat_template(messages)["input_ids"]
        said = [oracle.decode(row.input_ids[start:end].tolist()) for start, end in row.loss_spans]
        assert said == [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]


def test_the_cache_key_is_written_into_the_token_file(request_for, jsonl):
    done = prepare_tenant(request_for(jsonl(GOOD)))
    assert TokenFile(done.token_path).key == done.token_path.parent.name


def test_an_unreachable_scheduler_is_an_input_error_that_names_the_variable(request_for, jsonl, monkeypatch):
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:1")
    monkeypatch.setattr(prepare, "CONNECT_SECONDS", 0.5)
    with pytest.raises(InputError, match="DASK_SCHEDULER_ADDRESS: no Dask scheduler answers at"):
        prepare_tenants([request_for(jsonl(GOOD))], num_workers=0)
