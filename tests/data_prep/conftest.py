"""Fixtures of data preparation: tokenizers with other templates, requests, the real data sets."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.config import DatasetConfig
from data_prep.prepare import PrepareRequest
from data_prep.tokenizer import Tokenizer, load_tokenizer

# What most published tokenizers have: no {% generation %}, a generation prompt, a prefix-stable render.
CHATML = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content"
    " + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def chatml() -> str:
    return CHATML


@pytest.fixture
def changed_tokenizer(tokenizer_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tokenizer folder with another chat template ("" for none) and other tokenizer_config.json keys."""

    def change(template: str | None = None, **config: object) -> Path:
        folder = tmp_path / f"tokenizer_{len(list(tmp_path.glob('tokenizer_*')))}"
        shutil.copytree(tokenizer_folder, folder)
        if template == "":
            (folder / "chat_template.jinja").unlink()
        elif template is not None:
            (folder / "chat_template.jinja").write_text(template)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return folder

    return change


@pytest.fixture
def request_for(tokenizer_folder: Path, tmp_path: Path) -> Callable[..., PrepareRequest]:
    """A request for a data file; a prompt/response data set unless `messages_column` is given."""

    def make(
        path: Path, tenant: str = "ann", folder: Path = tokenizer_folder, cache: str = "cache", **dataset: object
    ) -> PrepareRequest:
        if "messages_column" not in dataset:
            dataset = {"prompt_column": "question", "response_column": "answer"} | dataset
        config = DatasetConfig.model_validate({"path": path, **dataset})
        return PrepareRequest(tenant, config, folder, tmp_path / cache, tmp_path / "run")

    return make


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real data sets are not here")
    return folder


@pytest.fixture(scope="session")
def tool_template() -> str:
    """A chat template that reads tools and tool calls, with marked assistant turns."""
    return (
        "{{ bos_token }}{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% for call in message.tool_calls or [] %}"
        "{{ 'CALL ' + call.function.name + ' ' + (call.function.arguments | tojson) }}{% endfor %}{{ '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
