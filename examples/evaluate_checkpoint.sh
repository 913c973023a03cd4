#!/usr/bin/env bash
# The perplexity of a checkpoint on a text, and a task of lm-eval, on two processes of the CPU; no conversion.
# [LOAD=CHECKPOINTS|hf:DIR] [DATA=FILE] bash examples/evaluate_checkpoint.sh; by default the model of quickstart.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
load=${LOAD:-runs/quickstart/checkpoints} data=${DATA:-pretrain_gpt.py}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PET_LOCAL_ADDR=127.0.0.1 # torchrun looks up no name of this machine
# as --standalone, but without the name localhost, which a bare system may not resolve
launch=(torchrun --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --nproc-per-node 2)

echo "== perplexity on $data; the processes share every matrix"
"${launch[@]}" tasks/evaluate/perplexity.py --load "$load" --data "$data" --device cpu --tensor-model-parallel-size 2

python -c 'import lm_eval' 2>/dev/null || {
    echo "no tasks: lm-eval is missing (pip install 'megatron-pretrain[evaluate]')"
    exit 0
}
tasks=$(mktemp -d)
trap 'rm -rf "$tasks"' EXIT
cat >"$tasks/python.yaml" <<END
task: python_words
dataset_path: json
dataset_kwargs: {data_files: {test: $tasks/python.jsonl}, cache_dir: $tasks}
test_split: test
output_type: multiple_choice
doc_to_text: "{{code}}"
doc_to_choice: "{{words}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
END
cat >"$tasks/python.jsonl" <<'END'
{"code": "    def __init__(", "words": ["self", "None", "import"]}
{"code": "import", "words": [" sys", " self", " return"]}
{"code": "    for i in", "words": [" range", " def", " class"]}
{"code": "        return", "words": [" self", " import", " def"]}
{"code": "if __name__ ==", "words": [" '__main__'", " self", " 0"]}
{"code": "        raise", "words": [" ValueError", " range", " len"]}
END
echo "== a task of lm-eval; each process computes half of the layers"
"${launch[@]}" tasks/evaluate/harness.py --model_args "load=$load,pipeline_model_parallel_size=2" --device cpu \
    --include_path "$tasks" --tasks python_words --batch_size 8
