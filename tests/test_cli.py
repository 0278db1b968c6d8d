"""The command line from outside."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent / "integrations"))

from batch_files import make_model, read, write_lines

from paged_kv import PagedCache, __version__
from paged_kv.cli import app
from paged_kv.display import progress_line
from paged_kv.engine.stats import EngineStats
from paged_kv.integrations.batch import Progress
from tests.tiny import tiny_model, tokens

ROWS = [
    {"prompt": "abc def ghi jkl mno " * 3, "max_tokens": 4, "ignore_eos": True},
    {"prompt": "hello", "max_tokens": 3},
]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def paged_kv(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, status: int = 0):
        result = CliRunner().invoke(app, ["run", *arguments, "--model", str(model_folder), "--page-size", "4"])
        assert result.exit_code == status, result.output + str(result.exception)
        return " ".join(result.output.split())

    return call


def test_run_answers_each_line_and_prints_the_table(paged_kv):
    write_lines(Path("in.jsonl"), [*ROWS, "broken"])
    shown = paged_kv("in.jsonl", "--output", "out.jsonl")
    answers = read(Path("out.jsonl"))
    assert [line["line"] for line in answers] == [1, 2, 3]
    assert answers[0]["num_output_tokens"] == 4
    assert answers[2]["error"].startswith("line 3: not JSON")
    for word in (
        "output tokens/s",
        "peak pages",
        "DynamicCache would hold",
        "live tokens per layer",
        "freed by cropping",
    ):
        assert word in shown


@pytest.mark.parametrize("policy", ["streaming", "knorm", "snapkv", "tova", "h2o", "lagkv"])
def test_a_budget_crops_layers_differently_and_frees_pages(paged_kv, policy):
    write_lines(Path("in.jsonl"), ROWS)
    shown = paged_kv("in.jsonl", "-o", "out.jsonl", "--budget", "16", "--policy", policy)
    assert len(read(Path("out.jsonl"))) == 2
    # 60 tokens are kept to 24, 16 and 8 in the three layers: 15 pages to 6, 4 and 2.
    assert "pages freed by cropping │ 33" in shown


def test_the_same_command_again_does_nothing_and_another_one_is_refused(paged_kv):
    write_lines(Path("in.jsonl"), ROWS)
    paged_kv("in.jsonl", "-o", "out.jsonl")
    before = Path("out.jsonl").read_bytes()
    shown = paged_kv("in.jsonl", "-o", "out.jsonl")
    assert "2 of 2 rows are done already" in shown
    assert "nothing is left to do; --overwrite computes all rows again" in shown
    assert Path("out.jsonl").read_bytes() == before
    shown = paged_kv("in.jsonl", "-o", "out.jsonl", "--budget", "16", status=2)
    assert "belongs to another job (settings.budget was 0 and is 16; settings.policy was '' and is 'stream" in shown
    assert len(shown) < 300
    paged_kv("in.jsonl", "-o", "out.jsonl", "--budget", "16", "--overwrite")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl", "-o", "out.jsonl"], "cannot read missing.jsonl"),
        (["in.jsonl", "-o", "in.jsonl"], "same file"),
        (["in.jsonl", "-o", "out.jsonl", "--temperature", "-1"], "temperature must be between"),
        (
            ["in.jsonl", "-o", "out.jsonl", "--budget", "8", "--policy", "magic"],
            "policy must be one of streaming, knorm",
        ),
        (["in.jsonl", "-o", "out.jsonl", "--budget", "4"], "StreamingLLM always keeps 4 tokens, got a budget of 2"),
        (["in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["in.jsonl", "-o", "out.jsonl", "--backend", "magic"], "the names are auto, cpu"),
        (["in.jsonl", "-o", "out.jsonl", "--dtype", "int4"], "dtype must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_run_is_one_clear_line(paged_kv, arguments, message):
    write_lines(Path("in.jsonl"), ROWS)
    shown = paged_kv(*arguments, status=2)
    assert message in shown
    assert "Traceback" not in shown


def test_an_unknown_model_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(Path("in.jsonl"), ROWS)
    result = CliRunner().invoke(app, ["run", "in.jsonl", "-o", "out.jsonl", "--model", "no/such"])
    assert result.exit_code == 2
    assert "there is no folder 'no/such'" in result.output


def test_a_run_in_which_every_row_fails_ends_with_status_1(paged_kv):
    write_lines(Path("in.jsonl"), ["broken", {"prompt": ""}])
    assert "every row of this run failed" in paged_kv("in.jsonl", "-o", "out.jsonl", status=1)
    assert [line["finish_reason"] for line in read(Path("out.jsonl"))] == ["error", "error"]


def test_the_version_is_said():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"paged-kv {__version__}\n")


def test_progress_says_how_long_the_rest_takes_at_the_pace_of_this_run(paged_kv):
    stats = EngineStats(**dict.fromkeys(EngineStats.__dataclass_fields__, 0))
    assert "no row done yet" in progress_line(Progress(10, 4, 0, 0, 1.0, stats))
    # 4 of the 6 done rows were done before: 2 rows in 8 s.
    assert "16 s left" in progress_line(Progress(10, 6, 2, 0, 8.0, stats))
    assert "2 h 47 min left" in progress_line(Progress(10006, 6, 2, 0, 2.0, stats))


def test_doctor_says_what_is_there():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for word in ("paged-kv", "torch", "transformers", "attention: auto", "memory"):
        assert word in result.output


def test_answers_are_json_lines_a_reader_needs_nothing_else_for(paged_kv):
    write_lines(Path("in.jsonl"), [{"prompt": "abc", "id": "first", "max_tokens": 2, "temperature": 1, "n": 2}])
    paged_kv("in.jsonl", "-o", "out.jsonl")
    [line] = [json.loads(text) for text in Path("out.jsonl").read_text().splitlines()]
    assert line["id"] == "first"
    assert len(line["outputs"]) == 2


def test_inspect_draws_a_saved_cache_and_refuses_other_files(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = PagedCache.for_model(model, page_size=4)
    with torch.no_grad():
        model(tokens(1, 20), past_key_values=cache)
    cache.save(tmp_path / "cache")
    runner = CliRunner()
    shown = runner.invoke(app, ["inspect", str(tmp_path / "cache")])
    assert shown.exit_code == 0
    assert "row 0" in shown.output
    page = tmp_path / "map.html"
    assert runner.invoke(app, ["inspect", str(tmp_path / "cache"), "--html", str(page)]).exit_code == 0
    assert "row 0" in page.read_text()
    (tmp_path / "text").write_text("nothing")
    refused = runner.invoke(app, ["inspect", str(tmp_path / "text")])
    assert refused.exit_code == 2


def test_lines_that_break_a_tokenizer_or_bias_by_integers_stop_nothing(paged_kv):
    lines = [
        json.dumps({"prompt": "abc", "logit_bias": {"5": 1000}, "max_tokens": 2}),
        '{"prompt": "lone \\ud83d surrogate", "max_tokens": 2}',
        json.dumps({"prompt": "abc", "max_tokens": 2}),
    ]
    Path("in.jsonl").write_text("\n".join(lines) + "\n")
    paged_kv("in.jsonl", "--output", "out.jsonl")
    answers = read(Path("out.jsonl"))
    assert [line["line"] for line in answers] == [1, 2, 3]
    assert "error" not in answers[0]
    assert "error" not in answers[2]


def test_a_run_that_fails_before_its_first_row_leaves_the_output_free(paged_kv, model_folder):
    write_lines(Path("in.jsonl"), ROWS)
    failed = CliRunner().invoke(app, ["run", "in.jsonl", "-o", "out.jsonl", "--model", "/no/such"])
    assert failed.exit_code == 2
    assert not list(Path().glob("out.jsonl*"))
    assert "--budget" in paged_kv("in.jsonl", "--output", "out.jsonl", "--budget", "-5", status=2)
    paged_kv("in.jsonl", "--output", "out.jsonl")
    assert len(read(Path("out.jsonl"))) == 2
