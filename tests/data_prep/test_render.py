import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from data_prep.errors import DatasetError, RowError
from data_prep.render import RenderLimits, RenderProcess, RenderTask

LIMITS = RenderLimits(cpu_seconds=0.3, wall_seconds=20.0, memory_bytes=200 * 2**20, num_characters=10_000)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ONE_LONG_OPERATION = "{% set n = (a[0] + 8) ** (9 ** 9) %}"
GROWS = "{% set ns = namespace(x='ab') %}{% for a in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.fixture(scope="module")
def renderer():
    with RenderProcess(LIMITS) as process:
        yield process


def render(renderer, template, *rows):
    task = RenderTask({"templates": {"prompt_template": template}}, "dataset.prompt_template")
    answers = renderer.render(task, range(1, len(rows) + 1), rows)
    return [answer if isinstance(answer, RowError) else answer["texts"]["prompt_template"] for answer in answers]


def test_a_template_reads_columns_nested_values_and_the_row_itself(renderer):
    template = (
        "{% for part in CONTEXTS %}\n{{ loop.index }}. {{ part.text | trim }}\n{% endfor %}\n"
        "{{ QUESTION }} {{ row['odd name'] }} {{ tags | tojson }}\n"
    )
    row = {"CONTEXTS": [{"text": " a"}, {"text": "b "}], "QUESTION": "<é>?", "odd name": 3, "tags": ["<x>"]}
    assert render(renderer, template, row) == ['1. a\n2. b\n<é>? 3 ["<x>"]']


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ nothing }}", "dataset.prompt_template reads field 'nothing' that the row does not have"),
        ("{{ a.secret }}", "dataset.prompt_template reads a value that the row does not have"),
        ("{{ a.__class__ }}", "dataset.prompt_template reaches for an attribute that templates may not read"),
        ("{{ a.append(1) }}", "dataset.prompt_template reaches for an attribute that templates may not read"),
        ("{{ ''['__class__'] }}", "dataset.prompt_template reaches for an attribute that templates may not read"),
        ("{{ 1 / 0 }}", "dataset.prompt_template refuses the row"),
        ("{{ 'x' * 10001 }}", "dataset.prompt_template renders more than 10000 characters"),
        ("{{ '\\ud83d' }}", "dataset.prompt_template refuses the row"),
        (GROWS, "dataset.prompt_template takes more than 200 MiB of memory"),
        (ENDLESS, "dataset.prompt_template takes more than 0.3 CPU seconds"),
        (ONE_LONG_OPERATION, "dataset.prompt_template takes more than 0.3 CPU seconds"),
    ],
)
def test_a_template_that_goes_too_far_is_refused_for_the_row_and_the_next_rows_are_rendered(renderer, template, reason):
    guarded = "{% if is_bad %}" + template + "{% endif %}fine"
    before, bad, after = render(
        renderer, guarded, {"is_bad": False, "a": [1]}, {"is_bad": True, "a": [1]}, {"is_bad": False, "a": [1]}
    )
    assert (before, after) == ("fine", "fine")
    assert isinstance(bad, RowError)
    assert bad.reason == reason


def test_a_loop_inside_a_constant_is_refused_too_although_it_runs_while_the_template_compiles(renderer):
    with pytest.raises(DatasetError, match=r"takes more than 0\.3 CPU seconds, again in row 3; simplify it"):
        render(renderer, "{{ 9 ** (9 ** 9) }}", *[{}] * 5)


def test_a_process_that_was_killed_from_outside_is_started_anew(renderer):
    assert render(renderer, "{{ a }}", {"a": 1}) == ["1"]
    (child,) = [p for p in psutil.Process().children() if any("render_process" in part for part in p.cmdline())]
    child.kill()
    child.wait()
    assert render(renderer, "{{ a }}", {"a": 2}) == ["2"]


def test_batches_larger_than_a_pipe_pass_both_ways(renderer):
    rows = [{"a": f"{i}" + "x" * 5000} for i in range(500)]
    assert render(renderer, "{{ a }}", *rows) == [row["a"] for row in rows]


def test_a_template_cannot_change_what_the_next_template_sees(renderer):
    render(renderer, "{% set range = 3 %}{{ namespace(x=1).x }}", {})
    assert render(renderer, "{{ range(3) | list }}", {}) == ["[0, 1, 2]"]


def test_the_render_process_ends_when_its_parent_is_killed():
    program = (
        "import time\n"
        "from data_prep.render import RenderProcess, RenderTask\n"
        "renderer = RenderProcess()\n"
        "renderer.render(RenderTask({'templates': {'t': 'x'}}, 't'), [1], [{}])\n"
        "print(renderer._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_closing_leaves_no_process():
    before = psutil.Process().children()
    process = RenderProcess(LIMITS)
    render(process, "x", {})
    assert len(psutil.Process().children()) == len(before) + 1
    process.close()
    assert psutil.Process().children() == before
    assert render(process, "x", {}) == ["x"]
    process.close()
