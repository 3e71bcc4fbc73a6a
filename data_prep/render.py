"""Runs templates, foreign code that may loop or grow without end, in a process of their own.

One process serves any number of templates, starts with the first and ends with its parent (its input ends). A row that
breaks a limit costs the process, which is started anew for the next row; a template that does so time and again is an
error. JSON lines over pipes, nothing pickled. Linux only.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from data_prep.errors import DatasetError, RowError
from planning.errors import LobraError

PROGRAM = Path(__file__).with_name("render_process.py")
MAX_ENDS = 3
UNKNOWN_FIELD = re.compile(r"UndefinedError: '(\w+)' is undefined")  # a name that stands in the template itself
MEMORY_EXIT = 70


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What rendering one row may take. Wall time is for a process that waits, so it is generous."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 60.0
    memory_bytes: int = 512 * 2**20
    num_characters: int = 16 * 2**20


@dataclass(frozen=True, slots=True)
class RenderTask:
    """Templates to render and how; `setup` is what `render_process` documents, `name` is what messages call it."""

    setup: Mapping[str, object]
    name: str


class RenderProcess:
    """Renders batches, one at a time; several threads may share it."""

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self._limits = limits or RenderLimits()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process; a later `render` starts another."""
        with self._lock:
            self._end()

    def render(
        self, task: RenderTask, numbers: Sequence[int], items: Sequence[object]
    ) -> list[dict[str, Any] | RowError]:
        """Each item's answer, or what its template did wrong. `numbers` are the items' row numbers.

        Raises DatasetError for a template that does not compile, or that ended the process MAX_ENDS times.
        """
        answers: list[dict[str, Any] | RowError] = []
        num_ends = 0
        with self._lock:
            while len(answers) < len(items):
                answers += [self._checked(task, answer) for answer in self._attempt(task, items[len(answers) :])]
                if len(answers) == len(items):
                    break
                answers.append(self._broken_limit(task))
                num_ends += 1
                if num_ends == MAX_ENDS:
                    raise DatasetError(f"{answers[-1]}, again in row {numbers[len(answers) - 1]}; simplify it")
        return answers

    def _attempt(self, task: RenderTask, items: Sequence[object]) -> list[dict[str, Any]]:
        """Answers up to the item that ended the process, which then waits to be reaped."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            # -P: the script's folder holds modules named like those of the standard library.
            command = [sys.executable, "-P", str(PROGRAM)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        message = {**task.setup, "limits": asdict(self._limits), "items": items}
        try:
            stdin.write(json.dumps(message, default=str).encode() + b"\n")  # dates and decimals as their text
            stdin.flush()
        except BrokenPipeError:
            return []
        answers: list[dict[str, Any]] = []
        while len(answers) < len(items):
            line = stdout.readline()
            if not line.endswith(b"\n"):
                break
            answers.append(json.loads(line))
        return answers

    def _broken_limit(self, task: RenderTask) -> RowError:
        assert self._process is not None
        code = self._process.wait()
        self._end()
        if code == -signal.SIGPROF:
            return RowError(f"{task.name} takes more than {self._limits.cpu_seconds:g} CPU seconds")
        if code == -signal.SIGALRM:
            return RowError(f"{task.name} takes more than {self._limits.wall_seconds:g} seconds")
        if code == MEMORY_EXIT or code == -signal.SIGKILL:
            return RowError(self._too_much_memory(task))
        if code < 0:
            return RowError(f"{task.name} ends its process with {signal.Signals(-code).name}")
        raise LobraError(f"the render process ended with exit code {code}; its message stands in the log above")

    def _checked(self, task: RenderTask, answer: dict[str, Any]) -> dict[str, Any] | RowError:
        kind = answer.get("error")
        if kind is None:
            return answer
        name = f"dataset.{answer['key']}" if "key" in answer else task.name
        detail = answer.get("detail", "")
        if kind == "syntax":
            raise DatasetError(f"{name} does not compile, {detail}; correct it")
        field = UNKNOWN_FIELD.fullmatch(detail)
        reasons = {
            "memory": self._too_much_memory(task),
            "output": f"{name} renders more than {self._limits.num_characters} characters",
            "undefined": f"{name} reads {f'field {field[1]!r}' if field else 'a value'} that the row does not have",
            "forbidden": f"{name} reaches for an attribute that templates may not read",
            "refused": f"{name} refuses the row",
        }
        return RowError(reasons[kind], detail)

    def _too_much_memory(self, task: RenderTask) -> str:
        return f"{task.name} takes more than {self._limits.memory_bytes // 2**20} MiB of memory"

    def _end(self) -> None:
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it did not read is lost with it
                    pipe.close()
        self._process.wait()
        self._process = None
