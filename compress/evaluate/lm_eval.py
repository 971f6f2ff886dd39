"""Tasks of EleutherAI's lm-evaluation-harness (arc_easy, hellaswag, mmlu, ...) on a model of ours; needs the extra `eval`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.config.messages import did_you_mean
from runtime.errors import CompressError, RequestError
from runtime.system.distribution import how_to_install

if TYPE_CHECKING:
    from runtime.api.model import Model


def evaluate_tasks(
    model: Model,
    tasks: Sequence[str],
    *,
    task_path: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> dict[str, dict[str, Any]]:
    """Run lm-eval tasks.

    Args:
        model: with a tokenizer.
        tasks: names of tasks, groups or tags of lm-eval.
        task_path: a directory with task files (YAML) of your own.
        num_fewshot: examples in the prompt; None leaves what each task says.
        limit: only the first requests of each task.
        batch_size: sequences in one forward pass.

    Returns:
        {task: {metric: value}}, such as `{"arc_easy": {"acc": 0.42, "acc_stderr": 0.01, "acc_norm": ...}}`.

    Raises:
        RequestError: lm-eval is not installed, an unknown task, no tokenizer.
        CompressError: lm-eval could not carry a task out, mostly because its data could not be downloaded.
    """
    require_lm_eval()
    if model.tokenizer is None:
        raise RequestError(f"{model.artifact.path} has no tokenizer, which lm-eval tasks need")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from compress.evaluate.lm_eval_model import RuntimeLM

    if task_path is not None and not Path(task_path).is_dir():
        raise RequestError(f"task path {task_path} is no directory")
    manager = TaskManager(include_path=None if task_path is None else str(task_path))
    for task in tasks:
        if task not in manager.all_tasks:
            hint = did_you_mean(task, manager.all_tasks) or "; 'lm-eval ls tasks' lists them"
            raise RequestError(f"lm-eval has no task '{task}'{hint}")
    try:
        results = simple_evaluate(
            model=RuntimeLM(model, batch_size), tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager,
            log_samples=False, bootstrap_iters=1000,
        )  # fmt: skip
    except CompressError:
        raise
    except Exception as error:
        # Tasks bring code and data of many authors; whatever goes wrong there is told as it is.
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise CompressError(f"lm-eval could not run {', '.join(tasks)}: {reason}") from error
    if results is None:
        raise CompressError("lm-eval gave no results")
    return {task: _numbers(values) for task, values in results["results"].items()}


def require_lm_eval() -> None:
    """Raise `RequestError`, with how to install it, unless lm-eval is there."""
    if importlib.util.find_spec("lm_eval") is None:
        raise RequestError(f"--tasks needs lm-eval, which is not installed: {how_to_install('eval')}")


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """`{"acc,none": 0.5, "alias": ...}` as `{"acc": 0.5}`; a filter other than `none` stays in the name."""
    found = {}
    for key, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and "," in key:
            found[key.removesuffix(",none")] = value
    return found
