"""The program of the render process: templates over rows, within limits. Started by `render`, as a script.

It reads tasks as JSON lines and answers each item with one JSON line at once, so that an item without an answer is the
one that ended the process. It ends with its input. A task is `{"limits", "templates" | "chat", "items"}`:

* `templates`: jinja2 texts by key, an item is a row; the answer is `{"texts": {key: text}}`;
* `chat`: `{"template", "special_tokens", "is_marked"}`, an item is `{"messages", "tools"}`; the answer is
  `{"text", "turns"}`. If marked, turns are the spans (characters) of {% generation %} blocks; else one
  `[before, opened, closed]` per assistant turn, the renders that `data_prep.chat` locates it with, each a length where
  it is a prefix of the text;
* whatever fails is `{"error", "key", "detail"}`.

CPU and wall time are limited by interval timers whose signals end the process, since no Python code could stop a loop
inside a filter; memory by the address space, which raises MemoryError. Imports nothing of the project.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

DETAIL_CHARACTERS = 500
MEMORY_EXIT = 70

Answer = dict[str, Any]


class TemplateError(Exception):
    """One of several templates failed, for the cause that it is raised from."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; the end of the input follows
    for timer_signal in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(timer_signal, signal.SIG_DFL)
    for line in sys.stdin.buffer:
        task = json.loads(line)
        answer_item = _chat(task["chat"]) if "chat" in task else _rows(task["templates"])
        limits = task["limits"]
        _limit_memory(limits["memory_bytes"])
        for item in task["items"]:
            signal.setitimer(signal.ITIMER_PROF, limits["cpu_seconds"])
            signal.setitimer(signal.ITIMER_REAL, limits["wall_seconds"])
            answer = _answer(answer_item, item, limits["num_characters"])
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stdout.buffer.write(answer)
            sys.stdout.buffer.flush()


def _limit_memory(num_bytes: int) -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))


def _answer(answer_item: Callable[[Any], Answer], item: object, num_characters: int) -> bytes:
    try:
        answer = answer_item(item)
        encoded = json.dumps(answer).encode() + b"\n"
        texts = [answer["text"]] if "text" in answer else answer.get("texts", {}).values()
        if any(len(text) > num_characters for text in texts):
            return b'{"error": "output"}\n'
        for text in texts:
            text.encode()  # half a surrogate pair, which no tokenizer accepts
    except Exception as error:  # noqa: BLE001 - a template is foreign code and raises what it likes
        return json.dumps(_failure(error)).encode() + b"\n"
    return encoded


def _failure(error: BaseException) -> Answer:
    if isinstance(error, TemplateError) and error.__cause__ is not None:
        return _failure(error.__cause__) | {"key": error.key}
    if isinstance(error, MemoryError):
        return {"error": "memory"}
    if isinstance(error, TemplateSyntaxError):
        return {"error": "syntax", "detail": f"line {error.lineno}: {error.message}"}
    kinds = {UndefinedError: "undefined", SecurityError: "forbidden"}
    kind = next((name for cause, name in kinds.items() if isinstance(error, cause)), "refused")
    return {"error": kind, "detail": f"{type(error).__name__}: {error}"[:DETAIL_CHARACTERS]}


def _rows(templates: dict[str, str]) -> Callable[[Any], Answer]:
    def answer_item(row: dict[str, Any]) -> Answer:
        texts = {}
        for key, template in templates.items():
            try:
                texts[key] = _compiled(template).render({"row": row, **row})
            except Exception as error:
                raise TemplateError(key) from error
        return {"texts": texts}

    return answer_item


@lru_cache
def _compiled(template: str) -> Template:
    """Blocks leave no blank lines, as in chat templates; an unknown field is an error."""
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(template)


def _chat(chat: dict[str, Any]) -> Callable[[Any], Answer]:
    from transformers.utils.chat_template_utils import render_jinja_template  # slow, and row templates do without

    def render(item: dict[str, Any], end: int | None = None, opens: bool = False) -> tuple[str, list[list[int]]]:
        texts, spans = render_jinja_template(
            [item["messages"][:end]],
            tools=item["tools"],
            chat_template=chat["template"],
            add_generation_prompt=opens,
            return_assistant_tokens_mask=chat["is_marked"],
            **chat["special_tokens"],
        )
        return texts[0], spans

    def answer_item(item: dict[str, Any]) -> Answer:
        text, spans = render(item)
        if chat["is_marked"]:
            return {"text": text, "turns": spans[0]}

        def short(part: str) -> str | int:
            return len(part) if text.startswith(part) else part

        turns = []
        for index, message in enumerate(item["messages"]):
            if message["role"] == "assistant":
                before = [short(render(item, index)[0]), short(render(item, index, True)[0])] if index else [0, 0]
                turns.append([*before, short(render(item, index + 1)[0])])
        return {"text": text, "turns": turns}

    return answer_item


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        pass  # the parent has ended
    except MemoryError:
        os._exit(MEMORY_EXIT)
    os._exit(0)  # every answer is flushed, and taking the interpreter down takes longer than a small batch
