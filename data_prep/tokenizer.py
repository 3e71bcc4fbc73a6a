"""The base model's tokenizer, read from its local Hugging Face folder without importing torch.

`PreTrainedTokenizerFast` reads tokenizer.json as it is; `AutoTokenizer` would import torch through the model
configurations. Slow (sentencepiece-only) tokenizers are not read.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from data_prep.errors import DatasetError
from data_prep.render import RenderTask
from data_prep.types import Span

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
        self._rust = backend.backend_tokenizer
        self._rust.no_padding()
        self._rust.no_truncation()
        self.bos_id: int | None = backend.bos_token_id
        self.eos_id: int | None = backend.eos_token_id
        self.added_tokens: tuple[str, ...] = tuple(sorted(backend.added_tokens_encoder, key=len, reverse=True))
        self.chat_templates: ChatTemplates | None = None
        if backend.chat_template:
            self.chat_templates = ChatTemplates(
                plain=backend.get_chat_template(),
                with_tools=backend.get_chat_template(tools=[]),
                special_tokens=dict(backend.special_tokens_map),
            )

    def encode(self, text: str) -> list[int]:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, on all cores unless TOKENIZERS_PARALLELISM is false."""
        return [encoding.ids for encoding in self._rust.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_all_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span]]]:
        """Token ids of each text, and each token's half-open range of characters in it."""
        encodings = self._rust.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The tokenizer's chat template, and the one for conversations with tools, which mostly is the same."""

    plain: str
    with_tools: str
    special_tokens: dict[str, object]

    @property
    def read_tools(self) -> bool:
        return re.search(r"\btools\b", self.with_tools) is not None

    def task(self, has_tools: bool) -> RenderTask:
        """How the render process renders conversations."""
        template = self.with_tools if has_tools else self.plain
        chat = {
            "template": template,
            "special_tokens": self.special_tokens,
            "is_marked": GENERATION_MARKER.search(template) is not None,
        }
        return RenderTask({"chat": chat}, "the chat template")

    def read_tool_calls(self, has_tools: bool) -> bool:
        return "tool_calls" in (self.with_tools if has_tools else self.plain)


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
