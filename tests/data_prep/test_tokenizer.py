import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.errors import DatasetError
from data_prep.tokenizer import load_tokenizer, tokenizer_fingerprint


def test_preparing_a_tenant_imports_no_torch(request_for, jsonl, tmp_path):
    plain = jsonl([{"question": "Why?", "answer": "Because."}])
    chat = jsonl(
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}], "chat.jsonl"
    )
    requests = [request_for(plain).to_dict(), request_for(chat, messages_column="messages").to_dict()]
    program = (
        "import sys\n"
        "from data_prep.prepare import PrepareRequest, prepare_tenants\n"
        "from data_prep import collate, histogram, sampler\n"
        f"requests = [PrepareRequest.from_dict(values) for values in {requests!r}]\n"
        "rows = [done.num_rows for done in prepare_tenants(requests, num_workers=0)]\n"
        "print(rows, [name for name in sys.modules if name.split('.')[0] in ('torch', 'prefect', 'mlflow')])\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1, 1] []"


def test_a_missing_tokenizer_folder_is_named_with_its_remedy(tmp_path):
    with pytest.raises(DatasetError, match=r"nowhere does not exist; set base_model\.path"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_tokenizer_file_is_named_with_its_remedy(changed_tokenizer, name):
    folder = changed_tokenizer()
    (folder / name).unlink()
    for read in (load_tokenizer, tokenizer_fingerprint):
        with pytest.raises(DatasetError, match=f"has no {name}; write it with .*save_pretrained"):
            read(folder)


@pytest.mark.parametrize("text", ["{", "{}", '{"model": 3}'])
def test_a_damaged_tokenizer_is_an_input_error(changed_tokenizer, text):
    folder = changed_tokenizer()
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(DatasetError, match="cannot be read"):
        load_tokenizer(folder)


def test_a_truncation_stored_in_the_tokenizer_is_not_applied(changed_tokenizer, tokenizer):
    from tokenizers import Tokenizer

    folder = changed_tokenizer()
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.enable_truncation(max_length=3)
    stored.enable_padding(length=64)
    stored.save(str(folder / "tokenizer.json"))
    text = "The capital of France is Paris, xyz."
    assert load_tokenizer(folder).encode(text) == tokenizer.encode(text)
    assert len(tokenizer.encode(text)) > 3


def test_the_fingerprint_depends_on_every_tokenizer_file_and_on_nothing_else(changed_tokenizer, tokenizer_folder):
    original = tokenizer_fingerprint(tokenizer_folder)
    assert tokenizer_fingerprint(changed_tokenizer(template=None)) != tokenizer_fingerprint(changed_tokenizer("x"))
    assert tokenizer_fingerprint(changed_tokenizer(bos_token="</s>")) != original
    folder = changed_tokenizer()
    (folder / "tokenizer_config.json").write_bytes((tokenizer_folder / "tokenizer_config.json").read_bytes())
    (folder / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_fingerprint(folder) == original
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    assert tokenizer_fingerprint(folder) != original
