"""Let a Hugging Face model write, by transformers alone: ``python write_with_transformers.py FOLDER [PROMPT]``."""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

folder, prompt = sys.argv[1], "".join(sys.argv[2:3])
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
set_seed(1)
ids = tokenizer(prompt or tokenizer.eos_token, return_tensors="pt").input_ids  # without a prompt, a new document
written = model.generate(ids, max_new_tokens=120, do_sample=True, temperature=0.8, top_p=0.95)
print(tokenizer.decode(written[0], skip_special_tokens=True))
