"""lm-eval through the extra: a task of our own on local data. Skipped where lm-eval is not installed."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
import torch

import runtime
from compress.evaluate import evaluate_tasks
from compress.evaluate.lm_eval import require_lm_eval
from runtime.errors import RequestError
from runtime.system.distribution import how_to_install

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
CHOICES = """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
ROLLING = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
"""
UNTIL = """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""


def test_missing_extra_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=re.escape(how_to_install("eval"))):
        require_lm_eval()


@pytest.fixture(scope="module")
def model(tiny_llama):
    return runtime.load(tiny_llama(), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def documents(model):
    """Questions whose right answers are what the model itself finds likelier, and its own greedy words."""
    found = []
    for number in range(5):
        question, choices = f"{number} plus one is", [" aa", " bbb"]
        written = model.generate(question, max_new_tokens=8).split("\n")[0]
        likely = [TestTasks.plain(model, question, choice)[0] for choice in choices]
        entry = {"question": question, "choices": choices, "answer": likely.index(max(likely)), "written": written}
        found.append(entry)
    return found


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the extra `eval`")
class TestTasks:
    @pytest.fixture
    def tasks(self, tmp_path, documents):
        data = tmp_path / "data.json"
        data.write_text("\n".join(map(json.dumps, documents)))
        for name, body in (("own_choices", CHOICES), ("own_rolling", ROLLING), ("own_until", UNTIL)):
            (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + body)
        return tmp_path

    @staticmethod
    def plain(model, context, continuation):
        ids = model.tokenizer(context + continuation)["input_ids"]
        start = len(model.tokenizer(context)["input_ids"])
        scores = torch.log_softmax(model.logits([ids])[0, :-1], -1)
        picked = scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])][start - 1 :]
        greedy = bool((scores.argmax(-1)[start - 1 :] == torch.tensor(ids[start:])).all())
        return float(picked.sum()), greedy

    def test_all_three_kinds_of_request(self, model, tasks, documents):
        result = evaluate_tasks(model, ["own_choices", "own_rolling", "own_until"], task_path=tasks, batch_size=2)
        assert result["own_choices"]["acc"] == 1.0
        assert result["own_until"]["exact_match"] == 1.0
        nats = sum(self.plain_rolling(model, entry["question"]) for entry in documents)
        length = sum(len(entry["question"].encode()) for entry in documents)
        expected = -nats / length / torch.log(torch.tensor(2.0)).item()
        assert result["own_rolling"]["bits_per_byte"] == pytest.approx(expected, rel=1e-4)

    @staticmethod
    def plain_rolling(model, text):
        ids = [model.tokenizer.eos_token_id, *model.tokenizer(text)["input_ids"]]
        return model.score(ids).log_likelihood

    def test_likelihoods_against_one_at_a_time(self, model):
        from compress.evaluate.lm_eval_model import RuntimeLM

        pairs = [("a long context here", " yes"), ("short", " no way"), ("mid length", " x")]
        encode = lambda text: model.tokenizer(text)["input_ids"]  # noqa: E731
        found = RuntimeLM(model, 2)._loglikelihood_tokens([(pair, encode(pair[0]), encode(pair[1])) for pair in pairs])
        for (value, greedy), (context, continuation) in zip(found, pairs, strict=True):
            expected, expected_greedy = self.plain(model, context, continuation)
            assert value == pytest.approx(expected, rel=1e-4)
            assert greedy == expected_greedy

    def test_unknown_task_names_the_nearest(self, model):
        with pytest.raises(RequestError, match="'hellaswag'"):
            evaluate_tasks(model, ["helaswag"])
