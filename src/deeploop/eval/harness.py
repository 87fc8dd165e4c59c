"""Run lm-evaluation-harness on a model.

There is one adapter with a function as scorer: it runs a model, records the requests, or replays scores
computed elsewhere. Prompts, tokens and metrics are the harness' own in all cases.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np
from tqdm import tqdm

from deeploop.extras import how_to_install

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import evaluate
    from lm_eval.utils import get_rolling_token_windows, hash_string, make_disjoint_window
except ModuleNotFoundError as missing:
    raise ValueError(
        f"evaluation needs lm-evaluation-harness (no module {missing.name}); run: {how_to_install('eval')}"
    ) from None

from deeploop.data.tokenizers import Tokenizer
from deeploop.eval.generation import GREEDY, generate
from deeploop.eval.requests import TOO_LONG, Request, Requests, Scores
from deeploop.eval.sampling import Sampling
from deeploop.eval.tasks import FEWSHOT_SEED, quiet
from deeploop.models.gpt import LoopedGPT

Scorer = Callable[[Requests], Scores]
BOOTSTRAPS = 1000  # for the errors of metrics other than means; accuracy needs none
MAX_NEW_TOKENS = 256  # the harness' default


class HarnessLM(TemplateLM):
    """The harness' model interface. Tasks that generate or score whole documents need a `model`."""

    def __init__(self, tokenizer: Tokenizer, scorer: Scorer, model: LoopedGPT | None = None) -> None:
        super().__init__()
        self.text, self.scorer, self.model = tokenizer, scorer, model
        self.shots = 0
        self._sources: list[tuple[str, int, int]] = []
        # A context is encoded again with each of its choices.
        self._encode = lru_cache(maxsize=64)(tokenizer.encode)

    @property
    def eot_token_id(self) -> int:
        return self.text.end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._encode(string)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._sources = [(request.task_name, request.doc_id, request.idx) for request in requests]
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        scores = self._score(
            Request(context, continuation, task, self.shots, document, choice)
            for (_, context, continuation), (task, document, choice) in zip(
                requests, self._sources, strict=True
            )
        )
        return list(zip(scores.logprob.tolist(), scores.greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        model = self._live(requests)
        windows = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.eot_token_id, model.config.context, 1):
                context, continuation = make_disjoint_window(window)
                windows.append(Request(context, continuation, request.task_name, document=number))
        total = np.zeros(len(requests))
        np.add.at(total, [window.document for window in windows], self._score(windows).logprob)
        return total.tolist()

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        model = self._live(requests)
        return [self._continue(model, *request.args) for request in requests]

    def _continue(self, model: LoopedGPT, prompt: str, options: dict[str, Any]) -> str:
        """Generate up to the first of the `until` strings; a long prompt is truncated on the left."""
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        sampling = GREEDY
        if options.get("do_sample"):
            sampling = Sampling(temperature=options.get("temperature", 1.0))
        count = min(int(options.get("max_gen_toks", MAX_NEW_TOKENS)), model.config.context // 2)
        ids = self.tok_encode(prompt)[count - model.config.context :] or [self.eot_token_id]
        new: list[int] = []
        text = ""
        for token in generate(model, ids, max_tokens=count, sampling=sampling, stop=self.eot_token_id):
            if token == self.eot_token_id:
                break
            new.append(token)
            text = self.text.decode(new)
            if any(stop in text for stop in until):
                break
        ends = [text.index(stop) for stop in until if stop in text]
        return text[: min(ends, default=len(text))]

    def _score(self, requests: Any) -> Scores:
        text = self.text
        return self.scorer(Requests.build(requests, tokenizer=text.name, vocabulary=text.vocabulary))

    def _live(self, requests: Sequence[Any]) -> LoopedGPT:
        if self.model is None:
            raise ValueError(
                f"tasks={requests[0].task_name}: needs more than likelihoods of answers, which can't be "
                "written as requests; evaluate it with the run: deeploop eval RUN"
            )
        return self.model


class Recorder:
    """A scorer that records the requests and returns zeros."""

    def __init__(self) -> None:
        self.asked: list[Requests] = []

    def __call__(self, requests: Requests) -> Scores:
        self.asked.append(requests)
        return Scores(np.zeros(len(requests)), np.zeros(len(requests), dtype=bool))


class ScoreReplay:
    """A scorer that returns scores computed elsewhere, by the digest of the requests."""

    def __init__(self, scores: dict[str, Scores]) -> None:
        self.scores = scores

    def __call__(self, requests: Requests) -> Scores:
        digest = requests.digest()
        if digest not in self.scores:
            raise ValueError(
                "scores: were computed for other requests than those of the tasks here; use the same data, "
                "or write and score the requests again"
            )
        return self.scores[digest]


def set_shots(loaded: dict[str, Any], shots: int) -> dict[str, Any]:
    """Set the number of few-shot examples of tasks fresh from `load_tasks`."""
    tasks = loaded["tasks"].values()
    bar = tqdm(total=len(tasks), desc=f"prompts, {shots}-shot", unit=" tasks", disable=None)
    for task in tasks:
        if task.get_config("num_fewshot") != 0:  # 0 in a config is deliberate: the harness keeps it as well
            task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(FEWSHOT_SEED)
        _build_once(task, bar)
    return loaded


def _build_once(task: Any, bar: "tqdm[Any]") -> None:
    """Make a task build its requests only once: it takes a minute, and they do not depend on the rounds."""
    build, is_built = task.build_all_requests, False

    def again(**settings: Any) -> None:
        nonlocal is_built
        if not is_built:
            build(**settings)
            _leave_out_too_long(task)
            is_built = True
            bar.update()
            if bar.n == bar.total:
                bar.close()
        for instance in task.instances:
            instance.resps, instance.filtered_resps = [], {}

    task.build_all_requests = again


def _leave_out_too_long(task: Any) -> None:
    """Exclude documents from the harness' metrics if some answer does not fit the model's context."""
    documents = task.doc_iterator

    def fitting(**settings: Any) -> Iterator[tuple[int, Any]]:
        left_out = too_long(task)
        return ((number, document) for number, document in documents(**settings) if number not in left_out)

    task.doc_iterator = fitting


def too_long(task: Any) -> set[int]:
    """Indices of the documents with an answer that was not scored in the last evaluation."""
    return {
        instance.doc_id
        for instance in task.instances
        for answer in instance.resps
        if isinstance(answer, tuple) and answer[0] == TOO_LONG
    }


def run_tasks(
    lm: HarnessLM, loaded: dict[str, Any], *, shots: int, limit: int | None
) -> list[dict[str, Any]]:
    """Evaluate the tasks with the harness; return one result per task."""
    lm.shots = shots
    with quiet():
        results = evaluate(lm, loaded, limit=limit, bootstrap_iters=BOOTSTRAPS)
    return [_row(name, results, len(too_long(task))) for name, task in loaded["tasks"].items()]


def _row(name: str, results: dict[str, Any], left_out: int) -> dict[str, Any]:
    metrics = {
        key.removesuffix(",none"): value
        for key, value in results["results"][name].items()
        if "," in key and value != "N/A"
    }
    row = {
        "task": name,
        "shots": results["n-shot"][name],
        "items": results["n-samples"][name]["effective"],
        **({"left_out": left_out} if left_out else {}),
        "version": results["versions"][name],
        # As in the harness' own results: documents, prompts and targets.
        "hash": hash_string(
            "".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in results["samples"][name])
        ),
    }
    if "acc" in metrics:
        return row | {"acc": metrics["acc"], "stderr": metrics.get("acc_stderr")}
    return row | {"metrics": metrics}


def harness_version() -> str:
    return version("lm_eval")
