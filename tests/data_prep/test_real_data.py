"""The data sets of users, as they come. The oracle reads each with another library or in another way."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from transformers import PreTrainedTokenizerFast

from data_prep.config import DatasetConfig
from data_prep.prepare import PreparedTenant, PrepareRequest, prepare_tenants
from data_prep.shapes import ALPACA, ALPACA_INPUT
from data_prep.token_file import TokenFile

PUBMEDQA_PROMPT = "{% for context in CONTEXTS %}\n{{ context }}\n{% endfor %}\nQuestion: {{ QUESTION }}\nAnswer: "
PUBMEDQA_RESPONSE = "{{ LONG_ANSWER }}\n{{ final_decision }}"
QMSUM_PROMPT = (
    "{% for turn in meeting_transcripts %}\n{{ turn.speaker }}: {{ turn.content }}\n{% endfor %}\n"
    "{{ general_query_list[0].query }}\n"
)
SETS = {
    "gsm8k train": ("gsm8k/train.jsonl", {"prompt_column": "question", "response_column": "answer"}),
    "gsm8k test": (
        "gsm8k/test-00000-of-00001.parquet",
        {"format": "parquet", "prompt_column": "question", "response_column": "answer"},
    ),
    "pubmedqa": (
        "pubmedqa/ori_pqal.json",
        {"format": "json_by_id", "prompt_template": PUBMEDQA_PROMPT, "response_template": PUBMEDQA_RESPONSE},
    ),
    "qmsum": (
        "qmsum/test.jsonl",
        {"prompt_template": QMSUM_PROMPT, "response_template": "{{ general_query_list[0].answer }}"},
    ),
    "octopack": (
        "octopack_oasst_commitpackft/oasstcommitpackftmanual.jsonl",
        {"prompt_column": "prompt", "response_column": "completion"},
    ),
    "gpteacher": ("gpteacher_codegen/codegen-instruct.json", {"format": "json", "instruction_column": "instruction"}),
    "aci_bench train": (
        "aci_bench/train.csv",
        {"format": "csv", "prompt_column": "dialogue", "response_column": "note"},
    ),
    "aci_bench valid": (
        "aci_bench/valid.csv",
        {"format": "csv", "prompt_column": "dialogue", "response_column": "note"},
    ),
    "glaive": (
        "glaive_toolcall/glaive_toolcall_en_demo.json",
        {"format": "json", "conversations_column": "conversations", "tools_column": "tools"},
    ),
    "humaneval": ("humaneval/HumanEval.jsonl.gz", {"prompt_column": "prompt", "response_column": "canonical_solution"}),
    "tinker": ("tinker_conversations/conversations.jsonl", {"messages_column": "messages"}),
}
Prepared = dict[str, PreparedTenant]


@pytest.fixture(scope="module")
def tools_folder(tokenizer_folder: Path, tool_template: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    for path in tokenizer_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_text(tool_template)
    return folder


@pytest.fixture(scope="module")
def prepared(real_data: Path, tools_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("real")
    requests = [
        PrepareRequest(
            name,
            DatasetConfig.model_validate({"path": real_data / path, **dataset}),
            tools_folder,
            folder / "cache",
            folder,
        )
        for name, (path, dataset) in SETS.items()
    ]
    outcomes = prepare_tenants(requests, num_workers=0)
    assert [outcome for outcome in outcomes if not isinstance(outcome, PreparedTenant)] == []
    return {outcome.tenant: outcome for outcome in outcomes if isinstance(outcome, PreparedTenant)}


@pytest.fixture(scope="module")
def texts(prepared: Prepared, tools_folder: Path) -> Callable[[str, int], tuple[str, list[str]]]:
    """The whole text of a row, and the texts that carry loss."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tools_folder)

    def decode(name: str, index: int) -> tuple[str, list[str]]:
        row = TokenFile(prepared[name].token_path).row(index)
        said = [tokenizer.decode(row.input_ids[start:end].tolist()) for start, end in row.loss_spans]
        return tokenizer.decode(row.input_ids.tolist()), said

    return decode


def test_every_set_is_prepared_with_every_row_and_no_reject(prepared):
    assert {name: (done.num_rows, done.num_rejects) for name, done in prepared.items()} == {
        "gsm8k train": (5387, 0),
        "gsm8k test": (1319, 0),
        "pubmedqa": (1000, 0),
        "qmsum": (35, 0),
        "octopack": (1178, 0),
        "gpteacher": (4535, 0),
        "aci_bench train": (67, 0),
        "aci_bench valid": (20, 0),
        "glaive": (300, 0),
        "humaneval": (164, 0),
        "tinker": (128, 0),
    }


def test_column_pairs_of_every_format_come_out_as_prompt_and_response(texts, real_data):
    with (real_data / "aci_bench/train.csv").open(newline="") as file:
        notes = [(row["dialogue"], row["note"]) for row in csv.DictReader(file)]
    problems = pl.read_parquet(real_data / "gsm8k/test-00000-of-00001.parquet").rows()
    with gzip.open(real_data / "humaneval/HumanEval.jsonl.gz", "rt") as file:
        code = [(row["prompt"], row["canonical_solution"]) for row in map(json.loads, file)]
    with (real_data / "octopack_oasst_commitpackft/oasstcommitpackftmanual.jsonl").open() as file:
        commits = [(row["prompt"], row["completion"]) for row in map(json.loads, file)]
    sets = {"aci_bench train": notes, "gsm8k test": problems, "humaneval": code, "octopack": commits}
    for name, pairs in sets.items():
        for index in (0, 1, len(pairs) // 2, len(pairs) - 1):
            prompt, response = pairs[index]
            assert texts(name, index) == ("<s>" + prompt + response + "</s>", [response + "</s>"])


def test_pubmedqa_is_made_of_its_parts(texts, real_data):
    rows = list(json.loads((real_data / "pubmedqa/ori_pqal.json").read_text()).values())
    for index in (0, 1, 499, 999):
        row = rows[index]
        prompt = "".join(f"{context}\n" for context in row["CONTEXTS"]) + f"Question: {row['QUESTION']}\nAnswer: "
        response = f"{row['LONG_ANSWER']}\n{row['final_decision']}"
        assert texts("pubmedqa", index) == (f"<s>{prompt}{response}</s>", [response + "</s>"])


def test_qmsum_gives_one_sample_a_meeting(texts, real_data):
    meetings = [json.loads(line) for line in (real_data / "qmsum/test.jsonl").read_text().splitlines()]
    for index in (0, 34):
        whole, said = texts("qmsum", index)
        query = meetings[index]["general_query_list"][0]
        assert said == [query["answer"] + "</s>"]
        assert whole.startswith("<s>" + meetings[index]["meeting_transcripts"][0]["speaker"] + ": ")
        # A template that ends in one line break loses it, as jinja has it.
        assert whole.endswith(f"\n{query['query']}{query['answer']}</s>")


def test_gpteacher_has_the_alpaca_prompt_with_input_where_there_is_one(texts, real_data):
    rows = json.loads((real_data / "gpteacher_codegen/codegen-instruct.json").read_text())
    assert sum(row["input"] == "" for row in rows) == 955
    without = next(index for index, row in enumerate(rows) if row["input"] == "")
    for index, template in ((0, ALPACA_INPUT), (without, ALPACA)):
        prompt = template.format(**rows[index])
        assert texts("gpteacher", index) == (
            f"<s>{prompt}{rows[index]['response']}</s>",
            [rows[index]["response"] + "</s>"],
        )


def test_glaive_has_loss_on_what_the_assistant_says_and_calls_and_equals_transformers(
    texts, prepared, real_data, tools_folder
):
    oracle = PreTrainedTokenizerFast.from_pretrained(tools_folder)
    roles = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
    num_calls = 0
    for index, row in enumerate(json.loads((real_data / "glaive_toolcall/glaive_toolcall_en_demo.json").read_text())):
        messages, said = [], []
        for turn in row["conversations"]:
            message = {"role": roles[turn["from"]], "content": turn["value"]}
            if turn["from"] == "function_call":
                call = json.loads(turn["value"])
                message |= {"content": "", "tool_calls": [{"type": "function", "function": call}]}
                said.append(f"CALL {call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}<|im_end|>")
                num_calls += 1
            elif turn["from"] == "gpt":
                said.append(turn["value"] + "<|im_end|>")
            messages.append(message)
        tools = [{"type": "function", "function": tool} for tool in json.loads(row["tools"])] or None
        whole = oracle.apply_chat_template(messages, tools=tools)["input_ids"]
        assert TokenFile(prepared["glaive"].token_path).row(index).input_ids.tolist() == whole
        assert texts("glaive", index)[1] == said
    assert num_calls == 211
