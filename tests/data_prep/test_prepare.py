import json
import pickle
import stat

import polars as pl
import psutil
import pytest
from distributed import LocalCluster

from data_prep import prepare, workers
from data_prep.errors import DatasetError
from data_prep.files import file_sha256
from data_prep.prepare import PreparedTenant, PrepareRequest, TenantFailure, prepare_tenant, prepare_tenants
from data_prep.render import RenderLimits, RenderProcess
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


def test_truncated_rows_are_kept_and_counted_and_prompts_that_fill_max_length_are_dropped_and_counted(
    request_for, jsonl
):
    rows = [*GOOD, {"question": "Why?", "answer": "x" * 500}, {"question": "x" * 500, "answer": "y"}]
    done = prepare_tenant(request_for(jsonl(rows), max_length=100, overlong="truncate"))
    assert (done.num_rows, done.num_truncated) == (41, 1)
    assert done.reject_reasons == {"no token to learn within dataset.max_length": 1}
    assert max(TokenFile(done.token_path).num_tokens) == 100
    with pytest.raises(DatasetError, match=r"dataset\.max_drop_ratio 0\.02 allows"):
        prepare_tenant(request_for(jsonl(rows), max_length=100, overlong="truncate", max_drop_ratio=0.02))


def test_empty_rows_are_counted_per_reason(request_for, jsonl):
    rows = [{"question": " ", "answer": "a"}, {"question": "a", "answer": ""}, {"question": "a", "answer": "\n"}]
    assert prepare_tenant(request_for(jsonl([*GOOD, *rows]), max_reject_ratio=0.1)).reject_reasons == {
        "empty prompt (column 'question')": 1,
        "empty response (column 'answer')": 2,
    }


def test_a_template_with_a_field_that_no_row_has_is_an_error_with_the_nearest_one(request_for, jsonl):
    request = request_for(jsonl(GOOD), prompt_column=None, prompt_template="Q: {{ questoin }}")
    with pytest.raises(DatasetError) as caught:
        prepare_tenant(request)
    message = str(caught.value)
    assert "dataset.prompt_template: no row of " in message
    assert "has a column 'questoin'; the nearest is 'question'" in message


def test_a_template_may_do_without_an_optional_field(request_for, jsonl):
    template = "{{ question }}{% if hint is defined %} {{ hint }}{% endif %}"
    done = prepare_tenant(request_for(jsonl(GOOD), prompt_column=None, prompt_template=template))
    assert (done.num_rows, done.num_rejects) == (40, 0)


def test_a_template_that_lacks_its_field_in_one_row_rejects_that_row_with_field_and_remedy(request_for, jsonl):
    path = jsonl([*GOOD, {"answer": SECRET}])
    rules = {"prompt_column": None, "prompt_template": "{{ question }}"}
    with pytest.raises(DatasetError) as caught:
        prepare_tenant(request_for(path, **rules))
    message = str(caught.value)
    assert "1 x dataset.prompt_template reads field 'question' that the row does not have (first rows: 41)" in message
    assert message.endswith("or raise dataset.max_reject_ratio")
    assert SECRET not in message
    assert prepare_tenant(request_for(path, max_reject_ratio=0.03, **rules)).num_rows == 40


@pytest.mark.parametrize("marked", [True, False])
def test_an_endless_chat_template_fails_the_tenant_alone(request_for, jsonl, changed_tokenizer, monkeypatch, marked):
    monkeypatch.setattr(prepare, "RenderProcess", lambda: RenderProcess(RenderLimits(cpu_seconds=0.2)))
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    folder = changed_tokenizer(loop + ("{% generation %}{% endgeneration %}" if marked else ""))
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    endless = request_for(jsonl([talk] * 9, "chat.jsonl"), "ann", folder=folder, messages_column="messages")
    failure, done = prepare_tenants([endless, request_for(jsonl(GOOD), "bob")], num_workers=0)
    assert failure == TenantFailure(
        "ann", "tenant 'ann': the chat template takes more than 0.2 CPU seconds, again in row 3; simplify it"
    )
    assert isinstance(done, PreparedTenant)


def test_tools_that_the_chat_template_would_not_show_are_refused(request_for, jsonl):
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": "[]"}
    with pytest.raises(DatasetError, match=r"dataset\.tools_column is 'tools', but .* reads no tools; remove"):
        prepare_tenant(request_for(jsonl([talk]), messages_column="messages", tools_column="tools"))


def test_a_tools_column_that_no_row_has_is_an_error(request_for, jsonl, changed_tokenizer, tool_template):
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": "[]"}
    folder = changed_tokenizer(tool_template)
    with pytest.raises(DatasetError, match=r"dataset\.tools_column: .* column 'tool'; the nearest is 'tools'"):
        prepare_tenant(request_for(jsonl([talk]), folder=folder, messages_column="messages", tools_column="tool"))


def test_rows_held_out_are_in_a_token_file_of_their_own_and_added_rows_move_no_other(request_for, jsonl):
    def sides(rows):
        done = prepare_tenant(request_for(jsonl(rows), evaluation_ratio=0.3))
        files = [TokenFile(path) for path in (done.token_path, done.evaluation_path)]
        assert [file.num_rows for file in files] == [done.num_rows, done.num_evaluation_rows]
        return [{tuple(file.row(i).input_ids.tolist()) for i in range(file.num_rows)} for file in files]

    train, held_out = sides(GOOD[:30])
    assert len(train | held_out) == 30
    assert train & held_out == set()
    more_train, more_held_out = sides([*GOOD[30:], *GOOD[:30][::-1], *GOOD[:30]])
    assert train <= more_train
    assert held_out <= more_held_out
    assert more_train & more_held_out == set()


def test_no_row_is_held_out_unless_asked_for(request_for, jsonl):
    done = prepare_tenant(request_for(jsonl(GOOD)))
    assert (done.num_evaluation_rows, done.evaluation_path) == (0, None)
    assert PreparedTenant.from_dict(json.loads(json.dumps(done.to_dict()))) == done


@pytest.mark.parametrize(("ratio", "remedy"), [(0.9999, "leaves 0 to train on; lower it"), (0.0001, "raise it")])
def test_a_ratio_that_leaves_one_side_empty_is_an_error(request_for, jsonl, ratio, remedy):
    with pytest.raises(
        DatasetError, match=rf"dataset\.evaluation_ratio {ratio} holds out .* {remedy}, or give more rows"
    ):
        prepare_tenant(request_for(jsonl(GOOD), evaluation_ratio=ratio))


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


def test_one_file_on_several_dask_processes_gives_the_same_bytes_as_in_this_process(request_for, jsonl, monkeypatch):
    monkeypatch.setattr(workers, "BATCH_ROWS", 3)  # 27 batches a file
    plain = jsonl([*GOOD, "{broken", {"question": "x" * 900, "answer": "y"}, *GOOD])
    talks = [[{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}] for r in GOOD]
    chat = jsonl([{"messages": talk} for talk in talks], "chat.jsonl")
    template = "{{ question | upper }}{% if question.startswith('What is 7 ') %}{{ nothing }}{% endif %}"

    def requests(cache):
        rules = {"cache": cache, "max_reject_ratio": 0.1, "evaluation_ratio": 0.2}
        rendered = {"prompt_column": None, "prompt_template": template}
        return [
            request_for(plain, "plain", max_length=200, **rules),
            request_for(chat, "chat", messages_column="messages", **rules),
            request_for(plain, "rendered", **rendered, **rules),
            request_for(plain, "long", max_length=200, overlong="error", **rules),
            request_for(plain.with_name("none.jsonl"), "gone", **rules),
        ]

    seen = []
    here = prepare_tenants(requests("here"), num_workers=0)
    there = prepare_tenants(requests("there"), num_workers=2, on_done=seen.append)
    assert [done.tenant for done in there] == ["plain", "chat", "rendered", "long", "gone"]
    assert sorted(done.tenant for done in seen) == ["chat", "gone", "long", "plain", "rendered"]
    assert there[3:] == here[3:]
    assert "row 42 of" in there[3].reason
    assert "does not exist" in there[4].reason
    for one, other in zip(here[:3], there[:3], strict=True):
        assert "there" in other.token_path.parts
        assert one.num_evaluation_rows > 0
        assert one.token_path.read_bytes() == other.token_path.read_bytes()
        assert one.evaluation_path.read_bytes() == other.evaluation_path.read_bytes()
        assert pl.read_parquet(one.rejects_path).equals(pl.read_parquet(other.rejects_path))
        assert TokenFile(one.token_path).num_rows == one.num_rows


def test_the_cluster_named_in_the_environment_is_used_and_left_without_render_processes(
    request_for, jsonl, monkeypatch
):
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    others = psutil.Process().children()
    with LocalCluster(
        n_workers=1, processes=False, protocol="tcp", host="127.0.0.1", dashboard_address=None
    ) as cluster:
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", cluster.scheduler_address)
        requests = [request_for(jsonl(GOOD)), request_for(jsonl([talk], "chat.jsonl"), messages_column="messages")]
        assert [done.num_rows for done in prepare_tenants(requests, num_workers=0)] == [40, 1]
        assert psutil.Process().children() == others


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


def test_the_cache_key_is_written_into_the_token_file(request_for, jsonl):
    done = prepare_tenant(request_for(jsonl(GOOD)))
    assert TokenFile(done.token_path).key == done.token_path.parent.name


def test_an_unreachable_scheduler_is_an_input_error_that_names_the_variable(request_for, jsonl, monkeypatch):
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:1")
    monkeypatch.setattr(prepare, "CONNECT_SECONDS", 0.5)
    with pytest.raises(InputError, match="DASK_SCHEDULER_ADDRESS: no Dask scheduler answers at"):
        prepare_tenants([request_for(jsonl(GOOD))], num_workers=0)
