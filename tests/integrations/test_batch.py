"""Batch jobs: answers in order, nothing lost, repeated or changed when they are interrupted."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from batch_files import read, write_lines

from paged_kv.engine import SamplingParams
from paged_kv.engine.llm import LLM
from paged_kv.integrations.batch import BatchJob, manifest_of
from paged_kv.integrations.journal import JobError, Journal, fingerprint
from paged_kv.integrations.rows import is_failure

BASE = SamplingParams(max_tokens=6, temperature=0.8, seed=3, ignore_eos=True)


def rows(number: int) -> list:
    dice = random.Random(number)
    return [
        {"prompt": "".join(dice.choices("abcdefgh ", k=dice.randrange(1, 30))), "max_tokens": dice.randrange(1, 12)}
        for _ in range(number)
    ]


@pytest.fixture(scope="module")
def llm(model_folder):
    with LLM(model_folder, num_pages=2000, page_size=4, max_num_seqs=8, max_num_batched_tokens=64) as llm:
        yield llm


def job(llm, source: Path, output: Path, *, overwrite: bool = False, **options) -> BatchJob:
    journal = Journal(output, manifest_of(*fingerprint(source), "tiny", BASE))
    journal.open(source, overwrite=overwrite)
    return BatchJob(llm, source, journal, BASE, **options)


def run(llm, source: Path, output: Path, **options):
    batch = job(llm, source, output, **options)
    try:
        return batch.run()
    finally:
        batch._journal.close()


def test_every_line_is_answered_in_order_and_bad_ones_say_their_number(llm, tmp_path):
    lines = [
        *rows(10),
        "not json",
        "",
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": ""},
        {"prompt": 3},
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    progress = run(llm, source, tmp_path / "out.jsonl")
    answers = read(tmp_path / "out.jsonl")
    assert [line["line"] for line in answers] == [*range(1, 12), 13, 14, 15]
    assert [line["line"] for line in answers if is_failure(line)] == [11, 14, 15]
    assert answers[10]["error"].startswith("line 11: not JSON")
    assert answers[12]["error"] == "line 14: the prompt is empty"
    assert (progress.num_rows, progress.num_done, progress.num_errors) == (14, 14, 3)


def test_openai_lines_get_openai_answers(llm, tmp_path):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 1, "n": 2}
    lines = [
        {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "y", "method": "POST", "url": "/v1/completions", "body": {"prompt": "abc", "max_tokens": 2}},
        {"custom_id": "z", "method": "POST", "url": "/v1/completions", "body": {"prompt": ""}},
    ]
    run(llm, write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    chat, text, failed = read(tmp_path / "out.jsonl")
    assert (chat["custom_id"], chat["error"], chat["response"]["status_code"]) == ("x", None, 200)
    assert [choice["message"]["role"] for choice in chat["response"]["body"]["choices"]] == ["assistant"] * 2
    assert chat["response"]["body"]["usage"]["completion_tokens"] == 8
    assert isinstance(text["response"]["body"]["choices"][0]["text"], str)
    assert (failed["custom_id"], failed["response"]) == ("z", None)
    assert "the prompt is empty" in failed["error"]["message"]


def test_a_stopped_job_goes_on_with_what_was_finished(llm, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "ab", "max_tokens": 40}, *rows(30)])
    run(llm, source, tmp_path / "whole.jsonl")
    output = tmp_path / "out.jsonl"
    first = job(llm, source, output)
    steps = 0

    def stop(progress):
        nonlocal steps
        steps += 1
        first.stopping = steps == 14

    first._report = stop
    first.run()
    first._journal.close()
    assert read(output) == []
    assert (tmp_path / "out.jsonl.ahead.jsonl").exists()
    ahead = len((tmp_path / "out.jsonl.ahead.jsonl").read_text().splitlines())
    before = llm.engine.stats().num_prompt_tokens
    progress = run(llm, source, output)
    assert progress.num_done == 31
    assert llm.engine.stats().num_prompt_tokens > before
    assert ahead > 0
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not (tmp_path / "out.jsonl.ahead.jsonl").exists()


@pytest.mark.parametrize("torn", ['{"line": 8, "te', '{"line": 8}garbage\n', ""])
def test_a_torn_last_line_is_cut_off(llm, tmp_path, torn):
    source = write_lines(tmp_path / "in.jsonl", rows(12))
    run(llm, source, tmp_path / "out.jsonl")
    whole = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text("".join(whole.splitlines(keepends=True)[:7]) + torn)
    run(llm, source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == whole


def test_the_window_bounds_what_is_read_ahead_of_a_slow_row(llm, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "ab", "max_tokens": 60}, *rows(60)])
    batch = job(llm, source, tmp_path / "out.jsonl", window=10)
    most = 0

    def watch(progress):
        nonlocal most
        most = max(most, batch._journal.num_waiting + len(batch._pending))

    batch._report = watch
    assert batch.run().num_done == 61
    assert most <= 10


def test_retrying_runs_failed_rows_alone_and_puts_them_in_place(llm, tmp_path, monkeypatch):
    source = write_lines(tmp_path / "in.jsonl", rows(6))
    output = tmp_path / "out.jsonl"
    run(llm, source, output)
    whole = output.read_text()
    lines = whole.splitlines(keepends=True)
    lines[2] = json.dumps({"line": 3, "finish_reason": "error", "error": "line 3: lightning"}) + "\n"
    output.write_text("".join(lines))
    batch = job(llm, source, output)
    batch.run()
    assert batch.retry_errors().num_errors == 0
    assert output.read_text() == whole


def test_jobs_that_cannot_be_are_refused(llm, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", rows(2))
    with pytest.raises(JobError, match="same file"):
        job(llm, source, source)
    (tmp_path / "other.jsonl").write_text("precious\n")
    with pytest.raises(JobError, match="no output of this program"):
        job(llm, source, tmp_path / "other.jsonl")
    assert (tmp_path / "other.jsonl").read_text() == "precious\n"
    run(llm, source, tmp_path / "out.jsonl")
    changed = write_lines(tmp_path / "in.jsonl", rows(3))
    with pytest.raises(JobError, match=r"belongs to another job \(the input has changed; rows was 2 and is 3\)"):
        job(llm, changed, tmp_path / "out.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(JobError, match="holds no rows"):
        fingerprint(tmp_path / "empty.jsonl")
    with pytest.raises(JobError, match="cannot read"):
        fingerprint(tmp_path / "missing.jsonl")
    with pytest.raises(JobError, match=r"cannot write .*No such file"):
        job(llm, source, tmp_path / "nowhere" / "out.jsonl")


def test_a_full_disk_ends_the_job_with_what_is_written(llm, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", rows(5))
    run(llm, source, tmp_path / "whole.jsonl")
    batch = job(llm, source, tmp_path / "out.jsonl")
    real = batch._journal._file

    class Full:
        left = 2

        def write(self, data):
            if self.left == 0:
                raise OSError(28, "No space left on device")
            self.left -= 1
            return real.write(data)

        def __getattr__(self, name):
            return getattr(real, name)

    batch._journal._file = Full()
    with pytest.raises(JobError, match="No space left on device; 2 rows are done"):
        batch.run()
    batch._journal.close()
    assert llm.engine.stats().pages_used == 0
    run(llm, source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_batch import LLM, run
with LLM({model!r}, num_pages=2000, page_size=4, max_num_seqs=8, max_num_batched_tokens=64) as llm:
    print("ready", flush=True)
    run(llm, Path({source!r}), Path({output!r}))
"""


@pytest.mark.parametrize("moments", [3, pytest.param(20, marks=pytest.mark.nightly)])
def test_killed_jobs_end_with_the_same_file_as_an_uninterrupted_one(llm, model_folder, tmp_path, moments):
    source = write_lines(tmp_path / "in.jsonl", rows(200))
    run(llm, source, tmp_path / "whole.jsonl")
    output = tmp_path / "out.jsonl"
    here = str(Path(__file__).parent)
    code = CHILD.format(here=here, model=str(model_folder), source=str(source), output=str(output))
    dice = random.Random(1)
    kills = 0
    for _ in range(moments):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(dice.random() * 0.6)
        child.kill()
        kills += child.wait() == -9
        child.stdout.close()
    run(llm, source, output)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert kills > 0
