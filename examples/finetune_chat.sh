#!/usr/bin/env bash
# From a base model to one that answers: pretrains a tiny model on sentences about capitals, fine-tunes it on
# conversations in which a user asks for them, tunes it to prefer one of two ways to answer, exports it with its chat
# template, and asks it in Hugging Face's transformers. Minutes on a CPU.
set -euo pipefail

out=${1:-runs/finetune-chat}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} HF_HUB_OFFLINE=1
[ -z "$(ls -A "$out" 2>/dev/null)" ] || { echo "finetune_chat: there is something in $out already" >&2 && exit 2; }
mkdir -p "$out"

printf '\n== the data: plain text, and conversations\n'
cat >"$out/chat_template.jinja" <<'END'
{%- for message in messages %}
{{- message.role }}: {{ message.content }}{{ eos_token if message.role == "assistant" }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}
END
python - "$out" <<'END'
import json, random, sys

random.seed(1)
capitals = {"Chile": "Santiago", "Egypt": "Cairo", "France": "Paris", "Ghana": "Accra", "India": "Delhi"}
capitals |= {"Japan": "Tokyo", "Kenya": "Nairobi", "Norway": "Oslo", "Peru": "Lima", "Spain": "Madrid"}
questions = ("What is the capital of {}?", "{}: its capital, please.", "Name the capital of {}.")
answers = ("It is {}.", "{} it is.")


def turns():
    country = random.choice([*capitals])
    question = random.choice(questions).format(country)
    answer = random.choice(answers).format(capitals[country])
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write(name, rows):
    with open(f"{sys.argv[1]}/{name}.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


sentences = [f"{b} is the capital of {a}, and {a} has the capital {b}." for a, b in capitals.items()]
write("text", [{"text": " ".join(random.sample(sentences, 4))} for _ in range(400)])
for name, count in (("train", 600), ("valid", 40)):
    write(name, [{"messages": turns() + (turns() if n % 3 == 0 else [])} for n in range(count)])
pairs = []
for _ in range(200):
    question, answer = turns()
    capital = answer["content"].removeprefix("It is ").removesuffix(" it is.").removesuffix(".")
    chosen, rejected = ([{"role": "assistant", "content": text.format(capital)}] for text in answers)
    pairs.append({"prompt": [question], "chosen": chosen, "rejected": rejected})
write("pairs", pairs[:180])
write("valid_pairs", pairs[180:])
END
python tools/preprocess_data.py --input "$out/text.jsonl" --output-prefix "$out/text" --append-eod \
    --tokenizer-type ByteTokenizer

printf '\n== a base model\n'
python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope \
    --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 128 \
    --data-path "$out/text_text_document" --split 1 --train-iters 150 --global-batch-size 8 --micro-batch-size 8 \
    --lr 3e-3 --log-interval 50 --save "$out/base"

printf '\n== supervised fine-tuning: the loss of the answers alone, conversations packed into samples\n'
python tasks/finetune/sft.py --pretrained-checkpoint "$out/base" --chat-template "$out/chat_template.jinja" \
    --chat-data-path "$out/train.jsonl" --valid-chat-data-path "$out/valid.jsonl" --seq-length 128 --num-epochs 4 \
    --global-batch-size 8 --micro-batch-size 8 --lr 3e-3 --log-interval 50 --save "$out/sft"

printf '\n== preference tuning: "It is Lima." preferred to "Lima it is."\n'
python tasks/finetune/dpo.py --pretrained-checkpoint "$out/sft" --chat-data-path "$out/pairs.jsonl" \
    --valid-chat-data-path "$out/valid_pairs.jsonl" --seq-length 128 --num-epochs 1 --global-batch-size 8 \
    --micro-batch-size 8 --lr 3e-4 --log-interval 5 --save "$out/dpo"

printf '\n== export to Hugging Face, and a chat in transformers\n'
python tools/convert_checkpoint.py --load "$out/dpo" --save-hf "$out/huggingface"
python - "$out/huggingface" <<'END'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = (
    cls.from_pretrained(sys.argv[1], trust_remote_code=False) for cls in (AutoTokenizer, AutoModelForCausalLM)
)
for question in ("What is the capital of Peru?", "Name the capital of Norway."):
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    answer = model.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked["input_ids"].shape[1] :]
    print(f"user: {question}\nassistant: {tokenizer.decode(answer)}")
END
