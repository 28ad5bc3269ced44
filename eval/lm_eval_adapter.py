"""lm-eval and our engine: the engine as an `LM` class, and one run over any of lm-eval's tasks.

The only file that imports lm_eval. The class reads, cuts and truncates as lm-eval's own `HFLM`
does, so that scores are comparable; what it cannot do it refuses. lm-eval has no entry points for
models, so `python -m eval.lm_eval_adapter run --model weighbridge --model_args artifact=ART ...` is
its command line with this model known to it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lm_eval.evaluator
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.utils import (
    get_rolling_token_windows,
    make_disjoint_window,
    make_table,
    setup_logging,
)
from tqdm import tqdm

from eval.errors import EvaluationError, UsageError
from eval.lm_eval_scoring import EngineScorer, Generation
from eval.lm_eval_tasks import (
    check_yaml,
    group_of,
    in_one_line,
    is_task_file,
    unknown_name,
    with_local_data,
)
from quant.artifact.errors import ArtifactError
from runtime.config import EngineConfig
from runtime.request import SamplingParams
from runtime.text import ChatTemplateError, TextError

# generation_kwargs that change nothing for us; anything else that is unknown is refused.
_HARMLESS = {"num_beams": 1, "use_cache": True, "num_return_sequences": 1, "length_penalty": 1.0}
_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
             "frequency_penalty")  # fmt: skip


@register_model("weighbridge")
class WeighbridgeLM(TemplateLM):  # type: ignore[misc]
    """An artifact on the engine that serves it.

    Args:
        artifact: the artifact's directory.
        device, dtype, kv_cache_dtype, max_model_len, threads: EngineConfig's meaning.
        batch_size: most sequences at once; "auto" or None leaves the engine's choice.
        max_gen_toks: tokens per answer where the task says nothing.
        max_batch_size: taken and not needed: the engine batches by itself.
    """

    def __init__(
        self,
        artifact: str,
        *,
        device: str | None = None,
        dtype: Any = "auto",
        kv_cache_dtype: Any = "auto",
        max_model_len: int | None = None,
        threads: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_gen_toks: int = 256,
    ) -> None:
        super().__init__()
        config = EngineConfig(
            device=_device(device),
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            num_threads=threads,
            max_num_seqs=int(batch_size) if str(batch_size).isdecimal() else None,  # type: ignore
        )
        self._open(EngineScorer(Path(artifact), config), max_gen_toks)

    @classmethod
    def of(cls, scorer: EngineScorer, max_gen_toks: int = 256) -> WeighbridgeLM:
        """The class around an engine that is already loaded."""
        made = cls.__new__(cls)
        TemplateLM.__init__(made)
        made._open(scorer, max_gen_toks)
        return made

    def _open(self, scorer: EngineScorer, max_gen_toks: int) -> None:
        self.scorer = scorer
        self.max_gen_toks = max_gen_toks
        self._text = scorer.text

    @property
    def max_length(self) -> int:
        """Tokens read at once."""
        return self.scorer.max_length

    @property
    def eot_token_id(self) -> int:
        """The id of the tokenizer's end-of-text token."""
        return self._id_of(self._text.eos_token, "end-of-text")

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is conditioned on: BOS, else the end-of-text token."""
        if self._text.bos_token is not None:
            return self._id_of(self._text.bos_token, "BOS")
        return self.eot_token_id

    def _id_of(self, token: str | None, name: str) -> int:
        ids = self._text.encode(token, add_special_tokens=False) if token else []
        if len(ids) != 1:
            raise UsageError(f"the tokenizer has no {name} token ({token!r}), lm-eval needs one")
        return ids[0]

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval names its cache of built requests by."""
        return f"weighbridge-{self._text.chat_template_sha256 or 'no-template'}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; a text that already begins with BOS does not get a second one."""
        return self._text.encode(string, add_special_tokens is not False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The artifact's template; None when none is wanted."""
        if not chat_template:
            return None
        if isinstance(chat_template, str) and chat_template != "default":
            raise UsageError(f"no chat template named {chat_template!r}; the artifact has one only")
        if self._text.chat_template is None:
            raise UsageError("the artifact has no chat template; run without it")
        return self._text.chat_template

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as one text; UsageError when the template refuses it."""
        try:
            return self._text.render_chat(
                chat_history,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except ChatTemplateError as error:
            roles = ", ".join(message["role"] for message in chat_history)
            raise UsageError(f"{error} (roles: {roles})") from error

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations; bars on terminals only."""
        found: list[tuple[float, bool]] = super().loglikelihood(
            requests, disable_tqdm=disable_tqdm or not sys.stderr.isatty()
        )
        return found

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        with tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm or None) as bar:
            found = self.scorer.likelihoods(
                [(context, continuation) for _, context, continuation in requests], bar.update
            )
        answers = [(one.logprob, one.is_greedy) for one in found]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows that predict each token once."""
        windows = [self._windows(request.args[0]) for request in requests]
        flat = [(None, *window) for one in windows for window in one]
        found = iter(self._loglikelihood_tokens(flat, disable_tqdm))
        totals = [sum(next(found)[0] for _ in one) for one in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        rolling = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [make_disjoint_window(window) for window in rolling]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Answers up to the first stop string or the model's end of text."""
        jobs = [self._job(n, request) for n, request in enumerate(requests)]
        with tqdm(total=len(jobs), desc="answers", disable=disable_tqdm or None) as bar:
            texts = self.scorer.generate(jobs, bar.update)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _job(self, number: int, request: Any) -> Generation:
        prompt, said = request.args
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(said, self.max_gen_toks))
        until = handle_stop_sequences(kwargs.pop("until"), eos=self._text.eos_token)
        params = _sampling(kwargs, seed=number, task=request.task_name)
        return Generation(
            prompt=prompt,
            until=tuple(until),
            sampling=replace(params, stop_token_ids=self.scorer.stop_ids(until)),
        )

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results: which bytes were run, and how."""
        target = self.scorer.target
        return {
            "artifact_digest": target.engine.resolved.artifact_digest,
            "engine": target.description,
            "numerics": target.numerics(),
            "chat_template_sha256": self._text.chat_template_sha256,
            "max_length": self.max_length,
            "num_truncated": self.scorer.num_truncated,
        }


def _device(said: str | None) -> str:
    """lm-eval's command line always says cuda:0; like its own models, take what is there."""
    import torch

    if said is None or (said.startswith("cuda") and not torch.cuda.is_available()):
        return "auto"
    return said.removesuffix(":0")


def _sampling(kwargs: dict[str, Any], *, seed: int, task: str | None) -> SamplingParams:
    """generation_kwargs as lm-eval normalized them. `seed` tells repeats of a request apart."""
    temperature = kwargs.pop("temperature", None)
    if kwargs.pop("do_sample") and temperature is None:
        raise UsageError(f"task {task}: do_sample is true, but there is no temperature; name it")
    num_tokens = kwargs.pop("max_gen_toks")
    known = {name: kwargs.pop(name) for name in _SAMPLING if kwargs.get(name) is not None}
    unknown = {k: v for k, v in kwargs.items() if v is not None and _HARMLESS.get(k) != v}
    if unknown:
        raise UsageError(
            f"task {task}: generation_kwargs {', '.join(f'{k}={v}' for k, v in unknown.items())} "
            f"are not supported; known are until, max_gen_toks, do_sample, temperature, "
            f"{', '.join(_SAMPLING)}"
        )
    return SamplingParams(
        temperature=float(temperature or 0.0), max_tokens=num_tokens, seed=seed, **known
    )


class _LocalFactory(TaskFactory):  # type: ignore[misc]
    """Builds tasks whose files were checked and whose data was found beside them."""

    def _load_full_config(
        self, entry: Any, overrides: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        if entry.yaml_path:
            check_yaml(Path(entry.yaml_path))
        config = super()._load_full_config(entry, overrides)
        return with_local_data(config, entry.yaml_path and Path(entry.yaml_path).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """Which tasks to run and how.

    tasks: names, groups, tags or YAML files. include_path: a folder of task files. limit: documents
    per task (a share below 1). num_fewshot: None leaves the tasks' own. samples: write results and
    samples into this folder, in lm-eval's layout. Others as lm-eval's options of these names.
    """

    tasks: tuple[str, ...]
    include_path: Path | None = None
    limit: float | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    system_instruction: str | None = None
    samples: Path | None = None
    bootstrap_iters: int = 100_000
    confirm_run_unsafe_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResults:
    """lm-eval's own results (`table` is how it prints them) and the files written."""

    results: dict[str, Any]
    table: str
    files: tuple[Path, ...]


def load_tasks(run: TaskRun) -> dict[str, Any]:
    """The tasks of a run with their data, before any model is loaded.

    UsageError: a name that lm-eval does not know, a broken file, data that cannot be read.
    """
    groups = {name: group for name in run.tasks if (group := group_of(name))}
    files = {name: str(Path(name).resolve()) for name in run.tasks if is_task_file(name)}
    specs = [groups[name][0] if name in groups else files.get(name, name) for name in run.tasks]
    names = [name for name in specs if not is_task_file(name)]
    members = [member for _, some in groups.values() for member in some]
    manager = _manager(run, [Path(name).resolve().parent for name in groups], [*names, *members])
    if unknown := [name for name in names if name not in manager.task_index]:
        raise UsageError(unknown_name(unknown[0], run.include_path))
    try:
        loaded: dict[str, Any] = manager.load(specs)
    except UsageError:
        raise
    except Exception as error:  # tasks run code of their own, and `datasets` raises anything
        raise UsageError(f"cannot load {', '.join(run.tasks)}: {in_one_line(error)}") from error
    if empty := [name for name, task in loaded["tasks"].items() if not len(task.eval_docs)]:
        raise UsageError(f"no documents in {', '.join(empty)}")
    return loaded


def _manager(run: TaskRun, folders: list[Path], names: list[str]) -> Any:
    """lm-eval's own tasks are indexed (some 15,000 files) only when one of `names` needs them.

    folders: those of group files, whose members lie beside them.
    """
    paths = [*([run.include_path] if run.include_path else []), *folders]
    manager = TaskManager(include_path=paths, include_defaults=False)
    if any(name not in manager.task_index for name in names):
        manager = TaskManager(include_path=paths)
    manager._factory = _LocalFactory(meta=None)
    return manager


def run_tasks(lm: WeighbridgeLM, name: str, tasks: dict[str, Any], run: TaskRun) -> TaskResults:
    """All tasks on one loaded model. `name`: what the results call it.

    Raises:
        UsageError: a task asks for what the model or the options do not allow.
        EvaluationError: the model or the task failed, nothing came out, or it cannot be written.
    """
    tracker = EvaluationTracker(output_path=None if run.samples is None else str(run.samples))
    try:
        with _without_git():
            results = lm_eval.evaluator.simple_evaluate(
                model=lm,
                model_args={"model": name},
                tasks=list(tasks["tasks"]),
                task_manager=_Ready(tasks),
                num_fewshot=run.num_fewshot,
                limit=run.limit,
                log_samples=run.samples is not None,
                evaluation_tracker=tracker,
                system_instruction=run.system_instruction,
                apply_chat_template=run.apply_chat_template,
                fewshot_as_multiturn=run.apply_chat_template,
                bootstrap_iters=run.bootstrap_iters,
                confirm_run_unsafe_code=run.confirm_run_unsafe_code,
            )
    except (EvaluationError, ArtifactError, TextError, MemoryError):
        raise
    except Exception as error:  # the code of a task and of its metrics
        raise EvaluationError(f"lm-eval failed on its tasks: {in_one_line(error)}") from error
    _require_figures(results)
    results["config"] |= {"model": "weighbridge", "limit": run.limit}
    table = str(make_table(results))
    if "groups" in results:
        table += "\n" + str(make_table(results, "groups"))
    return TaskResults(results=results, table=table, files=_save(tracker, results, run.samples))


class _Ready:
    """A task manager whose tasks are loaded already."""

    def __init__(self, tasks: dict[str, Any]) -> None:
        self._tasks = tasks
        self.task_index: dict[str, Any] = {}
        self.all_tasks = list(tasks["tasks"])
        self.all_groups: list[str] = list(tasks.get("groups", {}))

    def load(self, names: list[str]) -> dict[str, Any]:
        return self._tasks


@contextmanager
def _without_git() -> Iterator[None]:
    """Without the commit of whatever repository the user stands in, and git's complaint of none."""
    kept = lm_eval.evaluator.get_git_commit_hash
    lm_eval.evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        lm_eval.evaluator.get_git_commit_hash = kept


def _require_figures(results: dict[str, Any]) -> None:
    """A task without one number has a metric whose name process_results never returned."""
    for task, found in results["results"].items():
        numbers = [v for k, v in found.items() if "," in k and not k.split(",")[0].endswith("_err")]
        if not numbers and task not in results.get("groups", {}):
            raise EvaluationError(
                f"task {task} gave no figure; every name in metric_list must be a key of what "
                "process_results returns"
            )


def _save(
    tracker: EvaluationTracker, results: dict[str, Any], folder: Path | None
) -> tuple[Path, ...]:
    """Results and samples as lm-eval writes them, and the proof that they were written."""
    if folder is None:
        return ()
    before = set(folder.glob("**/*.json*"))
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task, rows in samples.items():
        tracker.save_results_samples(task_name=task, samples=rows)
    written = sorted(set(folder.glob("**/*.json*")) - before)
    if len(written) != 1 + len(samples):
        raise EvaluationError(f"lm-eval could not write its results into {folder}")
    return tuple(written)


def hush(verbose: bool) -> None:
    """lm-eval's and `datasets`' own words on stderr: all of them, or errors only."""
    if verbose:
        setup_logging("INFO")
        return
    for name in ("lm_eval", "datasets", "evaluate", "absl"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main(arguments: Sequence[str] | None = None) -> None:
    """lm-eval's own command line, with the model `weighbridge` known to it."""
    from lm_eval.__main__ import cli_evaluate

    if arguments is not None:
        sys.argv[1:] = arguments
    cli_evaluate()


if __name__ == "__main__":
    main()
