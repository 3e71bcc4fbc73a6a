"""The base model's tokenizer, read from its local Hugging Face folder without importing torch.

`PreTrainedTokenizerFast` reads tokenizer.json as it is; `AutoTokenizer` would import torch through the model
configurations. Slow (sentencepiece-only) tokenizers are not read.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerFast

from data_prep.errors import DatasetError, RowError
from data_prep.types import Message, Span

REQUIRED_FILES = ("tokenizer.json", "tokenizer_config.json")
# All that PreTrainedTokenizerFast.from_pretrained reads; config.json decides about its repair of Mistral tokenizers.
FINGERPRINT_PATTERNS = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "config.json",
)
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Tokenizer:
    """What encoding needs of a transformers tokenizer, typed.

    Texts are never padded, truncated or given special tokens here, whatever tokenizer.json says.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.bos_id: int | None = backend.bos_token_id
        self.eos_id: int | None = backend.eos_token_id
        self.added_tokens: tuple[str, ...] = tuple(sorted(backend.added_tokens_encoder, key=len, reverse=True))
        self.chat_template: str | None = backend.get_chat_template() if backend.chat_template else None

    @property
    def marks_assistant_turns(self) -> bool:
        """Whether the chat template marks what the assistant says with {% generation %}."""
        return self.chat_template is not None and GENERATION_MARKER.search(self.chat_template) is not None

    def encode(self, text: str) -> list[int]:
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        """Token ids, and each token's half-open range of characters in `text`."""
        encoded = self._backend(
            text,
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        return encoded["input_ids"], encoded["offset_mapping"]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as text, by the sandboxed chat template."""
        rendered: str = self._apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        return rendered

    def encode_marked(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Token ids of the conversation, and 1 for each token that overlaps a {% generation %} block."""
        encoded = self._apply_chat_template(messages, tokenize=True, add_generation_prompt=False)
        return encoded["input_ids"], encoded["assistant_masks"]

    def _apply_chat_template(self, messages: Sequence[Message], tokenize: bool, add_generation_prompt: bool) -> Any:
        try:
            return self._backend.apply_chat_template(
                list(messages),
                tokenize=tokenize,
                add_generation_prompt=add_generation_prompt,
                return_dict=tokenize,
                return_assistant_tokens_mask=tokenize,
                padding=False,
                truncation=False,
                tokenizer_kwargs={"verbose": False},
            )
        except TemplateSyntaxError as error:
            raise DatasetError(f"the chat template does not compile, line {error.lineno}: {error.message}") from error
        except Exception as error:  # a template is foreign code and raises what it likes
            raise RowError("chat template refuses the conversation", f"{type(error).__name__}: {error}") from error


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads the tokenizer of a local Hugging Face folder; raises DatasetError when it is missing or damaged."""
    _check_files(folder)
    try:
        return Tokenizer(PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True))
    except Exception as error:  # tokenizers raises bare Exception on a damaged tokenizer.json
        raise DatasetError(
            f"tokenizer in {folder} cannot be read ({type(error).__name__}: {error}); copy the folder anew"
        ) from error


def tokenizer_fingerprint(folder: Path) -> str:
    """SHA-256 over names and bytes of all tokenizer files, chat templates included; DatasetError if one is missing."""
    _check_files(folder)
    paths = {path for pattern in FINGERPRINT_PATTERNS for path in folder.glob(pattern) if path.is_file()}
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        raise DatasetError(f"tokenizer folder {folder} does not exist; set base_model.path to a Hugging Face folder")
    for name in REQUIRED_FILES:
        if not (folder / name).is_file():
            raise DatasetError(
                f"tokenizer folder {folder} has no {name}; write it with "
                f"transformers.AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})"
            )
