"""Small lm-eval tasks over local JSONL: one of each kind, and broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

HEAD = """\
    task: {name}
    dataset_path: json
    dataset_kwargs: {{data_files: {{test: rows.jsonl, train: shots.jsonl}}}}
    test_split: test
    fewshot_split: train
    doc_to_text: "{{{{question}}}}"
    doc_to_target: "{{{{answer}}}}"
"""
GENERATE = "output_type: generate_until\nmetric_list: [{metric: exact_match}]\n"
KINDS = {
    "choice": 'output_type: multiple_choice\ndoc_to_choice: ["the fee", " within thirty days",'
    ' " France."]\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n',
    "generate": GENERATE + 'generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 24}\n',
    "endless": GENERATE + "generation_kwargs: {until: [], max_gen_toks: 24}\n",
    "sampled": GENERATE + "repeats: 3\n"
    "generation_kwargs: {until: [], max_gen_toks: 8, do_sample: true, temperature: 1.0}\n",
    "rolling": "output_type: loglikelihood_rolling\n"
    "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n",
    "custom": "output_type: generate_until\ngeneration_kwargs: {until: [], max_gen_toks: 4}\n"
    "process_results: !function metrics_of_ours.starts\n"
    "metric_list: [{metric: starts_with_a, aggregation: mean, higher_is_better: true}]\n",
    "no_metric": "output_type: generate_until\ngeneration_kwargs: {until: [], max_gen_toks: 4}\n"
    "process_results: !function metrics_of_ours.nothing\n"
    "metric_list: [{metric: starts_with_a, aggregation: mean, higher_is_better: true}]\n",
    "no_package": "output_type: generate_until\nprocess_results: !function needs_more.score\n",
    "no_file": "output_type: generate_until\n",
}
METRICS = """\
    def starts(doc, results):
        return {"starts_with_a": float(results[0].startswith(" a"))}


    def nothing(doc, results):
        return {}
"""


def TEXT_OF(number: int) -> str:
    sentence = f"Agreement {number} is made between the supplier and the customer. "
    return sentence * (12 if number % 4 == 3 else 1)


def write_tasks(folder: Path) -> Path:
    """A folder of task files with their data beside them."""
    rows = [
        {"question": f"Clause {n}: the customer shall pay", "answer": TEXT_OF(n)} for n in range(8)
    ]
    for name, kept in (("rows", rows), ("shots", rows[:3])):
        text = "".join(json.dumps(row | {"gold": 0}) + "\n" for row in kept)
        (folder / f"{name}.jsonl").write_text(text)
    for name, kind in KINDS.items():
        head = dedent(HEAD).format(name=name)
        if name == "choice":
            head = head.replace('"{{answer}}"', "gold")
        if name == "rolling":
            head = head.replace('"{{question}}"', '""')
        if name == "no_file":
            head = head.replace("rows.jsonl", "gone.jsonl")
        (folder / f"{name}.yaml").write_text(head + kind)
    (folder / "metrics_of_ours.py").write_text(dedent(METRICS))
    (folder / "needs_more.py").write_text("import langdetect_xyz\n")
    broken = folder / "broken"
    broken.mkdir()
    twice = "task: twice\ndataset_path: json\ndataset_kwargs: {}\ndataset_kwargs: {}\n"
    (broken / "twice.yaml").write_text(twice)
    return folder
