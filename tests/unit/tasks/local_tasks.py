"""Tasks of lm-eval whose data are files: multiple choice, perplexity and generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON = """
test_split: test
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder}/cache}}
task: {name}
"""

TASKS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "choices": (
        """
output_type: multiple_choice
target_delimiter: ""
doc_to_text: "{{question}}"
doc_to_choice: "{{options}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
        [
            {"question": "The sky is", "options": [" blue.", " green", " a"], "label": 0},
            {"question": "Two and two is ", "options": ["four.", "five"], "label": 0},
            {"question": "", "options": ["one two", "two one", "The sky"], "label": 1},
            {"question": "He opened the old", "options": [" door", " dog"], "label": 1},
            {"question": "This is longer than all positions of the model", "options": [" x", " yz"], "label": 0},
        ],
    ),
    "rolling": (
        """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
        [
            {"text": "one two three"},
            {"text": "The café on 5th Street opens at 7. It sells 1,200 cups a day; most of them are small."},
            {"text": "The sky is blue."},
        ],
    ),
    "written": (
        """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n", " t"], max_gen_toks: 9, do_sample: false}
metric_list: [{metric: exact_match, ignore_punctuation: true}]
""",
        [
            {"prompt": "The sky is", "answer": " blue"},
            {"prompt": "one two three one", "answer": ""},
            {"prompt": "Two", "answer": " and two"},
            {"prompt": "He opened the old door of the house and", "answer": ""},
        ],
    ),
}


def write_tasks(folder: Path) -> Path:
    """Write all tasks into a folder."""
    for name, (definition, documents) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        (folder / f"{name}.yaml").write_text(COMMON.format(data=data, name=name, folder=folder) + definition)
    return folder
