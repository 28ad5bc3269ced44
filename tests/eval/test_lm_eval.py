"""Our engine as lm-eval's model: its own numbers for the same weights, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval_tasks_of_ours import TEXT_OF, write_tasks

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from eval import lm_eval_adapter as adapter
from eval.cli import main
from eval.errors import EvaluationError, UsageError
from eval.lm_eval_adapter import TaskRun, WeighbridgeLM, load_tasks, run_tasks
from eval.lm_eval_scoring import EngineScorer
from eval.lm_eval_tasks import check_yaml, with_local_data
from runtime.config import EngineConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

REPO = Path(__file__).resolve().parents[2]
# Shorter than the longest document, so that rolling windows and truncation take part.
MAX_LENGTH = 192


@pytest.fixture(autouse=True)
def _no_inventory(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval describes the machine after each run, which takes longer than the run."""
    import lm_eval.evaluator

    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def tasks_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def model_dir(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(max_position_embeddings=MAX_LENGTH)


@pytest.fixture(scope="module")
def ours(model_dir: Path, dense_artifact: Callable[[Path], Path]) -> WeighbridgeLM:
    return WeighbridgeLM(str(dense_artifact(model_dir)), device="cpu")


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(model_dir), dtype="float32", device="cpu", batch_size=4)


def files(tasks_dir: Path, *names: str) -> tuple[str, ...]:
    return tuple(str(tasks_dir / f"{name}.yaml") for name in names)


def measure(lm: Any, run: TaskRun) -> dict[str, Any]:
    """lm-eval's results and samples of any of its models."""
    import lm_eval.evaluator

    found: dict[str, Any] = lm_eval.evaluator.simple_evaluate(
        model=lm,
        tasks=list(load_tasks(run)["tasks"]),
        task_manager=adapter._Ready(load_tasks(run)),
        num_fewshot=run.num_fewshot,
        apply_chat_template=run.apply_chat_template,
        fewshot_as_multiturn=run.apply_chat_template,
        bootstrap_iters=0,
    )
    return found


def numbers(results: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {
        (task, name): value
        for task, found in results["results"].items()
        for name, value in found.items()
        if isinstance(value, float)
    }


@pytest.mark.parametrize(
    ("num_fewshot", "chat"), [(None, False), (2, False), (1, True)], ids=["plain", "shots", "chat"]
)
def test_lm_evals_own_numbers_come_out(
    ours: WeighbridgeLM, theirs: Any, tasks_dir: Path, num_fewshot: int | None, chat: bool
) -> None:
    names = ("choice", "generate", "rolling") if num_fewshot is None else ("choice", "generate")
    run = TaskRun(tasks=files(tasks_dir, *names), num_fewshot=num_fewshot, apply_chat_template=chat)
    mine, reference = measure(ours, run), measure(theirs, run)
    assert numbers(mine) == pytest.approx(numbers(reference), rel=1e-4, abs=1e-4)
    assert numbers(mine)
    for task, rows in reference["samples"].items():
        for left, right in zip(mine["samples"][task], rows, strict=True):
            assert left["prompt_hash"] == right["prompt_hash"]
            assert left["doc_hash"] == right["doc_hash"]
            if task == "generate":
                assert left["resps"] == right["resps"]
                continue
            for (one,), (other,) in zip(left["resps"], right["resps"], strict=True):
                pair = (one, other) if task == "rolling" else (one[0], other[0])
                assert pair[0] == pytest.approx(pair[1], abs=1e-4)
                assert task == "rolling" or one[1] == other[1]


def test_documents_longer_than_the_context_are_scored_whole(ours: WeighbridgeLM) -> None:
    longest = max((TEXT_OF(n) for n in range(8)), key=len)
    assert len(ours.tok_encode(longest)) >= 2 * MAX_LENGTH
    windows = ours._windows(longest)
    assert sum(len(scored) for _, scored in windows) == len(ours.tok_encode(longest))


def test_scores_do_not_depend_on_company_or_order(ours: WeighbridgeLM) -> None:
    pairs = [(ours.tok_encode(TEXT_OF(n)), ours.tok_encode(" the fee")) for n in (1, 2, 3, 4)]
    together = ours.scorer.likelihoods([*pairs, *pairs[::-1]], lambda _: None)
    alone = [ours.scorer.likelihoods([pair], lambda _: None)[0] for pair in pairs]
    for one, other in zip(together, [*alone, *alone[::-1]], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.is_greedy == other.is_greedy


def test_an_answer_ends_before_the_first_stop_string(ours: WeighbridgeLM, tasks_dir: Path) -> None:
    whole, cut = (
        measure(ours, TaskRun(tasks=files(tasks_dir, name)))["samples"][name]
        for name in ("endless", "generate")
    )
    for left, right in zip(whole, cut, strict=True):
        text = left["resps"][0][0]
        assert right["resps"][0][0] == min((text.split(stop)[0] for stop in ("e", "\n")), key=len)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True}, "no temperature"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"max_gen_toks": 4096}, "smaller max_gen_toks"),
        ({"top_p": 0, "max_gen_toks": 8}, "top_p"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(
    ours: WeighbridgeLM, tasks_dir: Path, options: dict[str, Any], message: str
) -> None:
    run = TaskRun(tasks=files(tasks_dir, "generate"))
    tasks = load_tasks(run)
    tasks["tasks"]["generate"].set_config("generation_kwargs", {"until": ["x"], **options})
    with pytest.raises(UsageError, match=message):
        run_tasks(ours, "tiny", tasks, run)
    assert not ours.scorer.target.engine.has_work


def test_repeated_sampling_is_seeded_and_varied(ours: WeighbridgeLM, tasks_dir: Path) -> None:
    run = TaskRun(tasks=files(tasks_dir, "sampled"))
    first, second = (measure(ours, run)["samples"]["sampled"] for _ in range(2))
    assert [row["resps"] for row in first] == [row["resps"] for row in second]
    assert any(len(set(row["resps"][0])) > 1 for row in first)


def test_nan_is_never_a_score(ours: WeighbridgeLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.engine.score import Score

    broken = Score(nll=[float("nan")] * 3, kl=None, top1_agree=None, top1=[0] * 3)
    monkeypatch.setattr(ours.scorer, "_score", lambda items: [broken for _ in items])
    with pytest.raises(EvaluationError, match="NaN"):
        ours.scorer.likelihoods([([1, 2], [3, 4])], lambda _: None)


def test_the_command_writes_lm_evals_layout(
    ours: WeighbridgeLM, tasks_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)  # data lies beside the task files, not here
    art = ours.scorer.target.engine.artifact
    assert art is not None
    names = ",".join(files(tasks_dir, "choice", "custom"))
    with pytest.raises(SystemExit) as ended:
        main(["lm-eval", str(art.path), "--tasks", names, "--log-samples", "out", "--limit", "5"])
    assert ended.value.code == 0
    folder = tmp_path / "out" / art.path.name
    (results,) = folder.glob("results_*.json")
    config = json.loads(results.read_text())
    assert config["config"]["artifact_digest"] == art.digest
    assert config["config"]["numerics"]["compute_dtype"] == "float32"
    assert config["results"]["custom"]["starts_with_a,none"] in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    (samples,) = folder.glob("samples_choice_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == 5
    assert {"doc_hash", "prompt_hash", "target_hash", "acc"} <= set(rows[0])
    said = capsys.readouterr().out
    assert "acc_norm" in said
    assert "good for a look" in said
    with pytest.raises(SystemExit) as ended:  # and the folder is one that `compare` reads
        main(["compare", "out", "out", "--json"])
    assert ended.value.code == 3
    pairs = json.loads(capsys.readouterr().out)
    assert pairs["base"]["artifact_digest"] == art.digest
    assert {m["metric"] for m in pairs["metrics"]} == {"acc", "acc_norm", "starts_with_a"}
    assert all(m["num_items"] == 5 and m["estimate"] == 0 for m in pairs["metrics"])


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--tasks", "no_such_task_xyz"], 2, "twice.yaml: "),
        (["--tasks", "DIR/absent.yaml"], 2, "cannot read"),
        (["--tasks", "DIR/no_file.yaml"], 2, "no data file gone.jsonl at "),
        (["--tasks", "DIR/no_package.yaml"], 2, "needs the package langdetect_xyz"),
        (["--tasks", "DIR/no_metric.yaml"], 4, "metric"),
        (["--tasks", ","], 2, "--tasks is empty"),
        (["--tasks", "DIR/choice.yaml", "--limit", "0"], 2, "--limit is 0"),
        (["--tasks", "DIR/choice.yaml", "--dtype", "int3"], 2, "dtype"),
    ],
)
def test_broken_tasks_and_options_name_what_is_wrong(
    ours: WeighbridgeLM, tasks_dir: Path, options: list[str], code: int, message: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Indexing lm-eval's own 15,000 files takes half a minute here and is not what is tested.
    plain = adapter.TaskManager
    monkeypatch.setattr(
        adapter, "TaskManager", lambda **k: plain(**k | {"include_defaults": False})
    )
    art = ours.scorer.target.engine.artifact
    assert art is not None
    words = [word.replace("DIR", str(tasks_dir)) for word in options]
    with pytest.raises(SystemExit) as ended:
        main(["lm-eval", str(art.path), "--include-path", str(tasks_dir / "broken"), *words])
    assert message in capsys.readouterr().err
    assert ended.value.code == code


def test_a_group_file_brings_the_tasks_beside_it(tasks_dir: Path, ours: WeighbridgeLM) -> None:
    folder = tasks_dir / "group"
    folder.mkdir()
    for name in ("choice", "generate"):
        text = (tasks_dir / f"{name}.yaml").read_text().replace(f"task: {name}", f"task: g_{name}")
        (folder / f"{name}.yaml").write_text(text.replace("rows.jsonl", "../rows.jsonl"))
        (folder / "shots.jsonl").write_text((tasks_dir / "shots.jsonl").read_text())
    file = folder / "all.yaml"
    file.write_text(
        "group: ours\ntask: [g_choice, g_generate]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    run = TaskRun(tasks=(str(file),), bootstrap_iters=0)
    found = run_tasks(ours, "tiny", load_tasks(run), run)
    assert set(found.results["results"]) >= {"g_choice", "g_generate"}
    assert (
        found.results["groups"]["ours"]["acc,none"]
        == (found.results["results"]["g_choice"]["acc,none"])
    )
    assert "ours" in found.table


def test_a_key_said_twice_is_refused_with_its_line(tasks_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"'dataset_kwargs' stands here twice.*line 4"):
        check_yaml(tasks_dir / "broken" / "twice.yaml")


def test_data_without_a_split_goes_to_the_one_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    config = {"task": "t", "dataset_path": "json", "dataset_kwargs": {"data_files": "a.jsonl"}}
    found = with_local_data(config | {"test_split": "test"}, tmp_path)
    assert found["dataset_kwargs"]["data_files"] == {"test": [str(tmp_path / "a.jsonl")]}
    with pytest.raises(UsageError, match="names no split"):
        with_local_data(config | {"test_split": "a", "training_split": "b"}, tmp_path)
    named = config | {"dataset_kwargs": {"data_files": {"train": "a.jsonl"}}}
    with pytest.raises(UsageError, match="reads the split 'test', but data_files has only train"):
        with_local_data(named | {"test_split": "test"}, tmp_path)


@pytest.mark.parametrize(
    ("second", "message"),
    [('{"x": "2"}', r"a.jsonl:2: column 'x' is text here and number in line 1"),
     ('{"x": 1', "a.jsonl:2: not JSON"), ("[1]", "expected a JSON object")],
)  # fmt: skip
def test_a_column_of_two_types_is_refused_with_its_line(
    tmp_path: Path, second: str, message: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n' + second + "\n")
    config = {"task": "t", "dataset_path": "json", "test_split": "test",
              "dataset_kwargs": {"data_files": "a.jsonl"}}  # fmt: skip
    with pytest.raises(UsageError, match=message):
        with_local_data(config, tmp_path)


@pytest.mark.slow  # a process of its own imports everything once more
def test_lm_evals_own_command_line_knows_the_model(
    ours: WeighbridgeLM, tasks_dir: Path, tmp_path: Path
) -> None:
    art = ours.scorer.target.engine.artifact
    assert art is not None
    # Without the index of its own tasks and the inventory of the machine, which take longest.
    quick = (
        "import functools, runpy, lm_eval.evaluator as e, lm_eval.tasks as t; "
        "e.add_env_info = lambda results: None; "
        "t.TaskManager = functools.partial(t.TaskManager, include_defaults=False); "
        "runpy.run_module('eval.lm_eval_adapter', run_name='__main__', alter_sys=True)"
    )
    command = [
        sys.executable, "-c", quick, "run", "--model", "weighbridge",
        "--model_args", f"artifact={art.path}", "--tasks", "choice.yaml", "--limit", "4",
        "--output_path", str(tmp_path / "out"), "--log_samples",
    ]  # fmt: skip
    found = subprocess.run(
        command, cwd=tasks_dir, env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "acc_norm" in found.stdout
    assert list(tmp_path.glob("out/*/samples_choice_*.jsonl"))


def test_lm_eval_knows_the_model_by_name() -> None:
    from lm_eval.api.registry import get_model

    assert get_model("weighbridge") is WeighbridgeLM
    assert adapter._device("cuda:0") == ("auto" if not torch.cuda.is_available() else "cuda")
    assert adapter._device("cpu") == "cpu"


def test_a_base_without_bos_conditions_on_the_end_of_text(ours: WeighbridgeLM) -> None:
    assert ours.prefix_token_id == 0  # the tiny tokenizer's BOS
    assert ours.eot_token_id == 2


def test_the_scorer_names_what_it_ran(ours: WeighbridgeLM) -> None:
    info = ours.get_model_info()
    assert info["chat_template_sha256"]
    assert info["numerics"]["kv_cache_dtype"] == "float32"


def test_truncated_contexts_are_counted(model_dir: Path, dense_artifact: Any) -> None:
    scorer = EngineScorer(dense_artifact(model_dir), EngineConfig(device="cpu", max_model_len=16))
    scorer.likelihoods([(range(40), [1]), ([1], [2])], lambda _: None)
    assert scorer.num_truncated == 1
    with pytest.raises(UsageError, match="a continuation has 17 tokens"):
        scorer.likelihoods([([1], range(17))], lambda _: None)
