"""Malformed messages for a server that verifies: `python benchmarks/remote_fuzz.py --messages 20000`.

It starts a server of a tiny target on a thread, sends what no device would send, and reports the server's reactions,
the growth of its memory, and whether a text still decodes as before. It exits with 1 if the server failed, was silent
or grew, or if the text changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from runner import options, print_table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__, seed=0)
    parser.add_argument("--messages", type=int, default=20_000, help="messages to send; default: 20000")
    asked = parser.parse_args(arguments)
    from oracles.remote_fuzz import fuzz
    from oracles.remote_server import in_background
    from oracles.tiny import tiny_config, tiny_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_hsdraft.remote.link import Address
    from hf_hsdraft.remote.remote_model import RemoteModel
    from hf_hsdraft.remote.verify_server import VerifyServer

    server = VerifyServer(tiny_model(LlamaForCausalLM, tiny_config(LlamaConfig)), word_tokenizer())
    with in_background(server) as port:
        address = Address.of(f"http://127.0.0.1:{port}")
        with RemoteModel(address) as model:
            before = str(model.generate([5, 6, 7], max_new_tokens=20, do_sample=False))
            report = fuzz(address, asked.messages, asked.seed)
            same = str(model.generate([5, 6, 7], max_new_tokens=20, do_sample=False)) == before
        status = server.status()
    print(f"{report.messages} messages in {report.seconds:.1f} s; memory grew by {report.grown_mebibytes:.1f} MiB\n")
    print_table(("reaction", "times"), report.reactions.most_common())
    faults = report.faults + ([] if same else ["a text decodes otherwise than before"])
    faults += ["failures of the target"] if status["batches"]["failures"] else []
    for each in faults:
        print(f"fault: {each}")
    return 1 if faults else 0


def word_tokenizer() -> Any:
    """A tokenizer of a word for each token, with a chat template."""
    from oracles.tiny import VOCABULARY
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<unk>", *(f"w{number}" for number in range(VOCABULARY - 1))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", chat_template=template)


if __name__ == "__main__":
    sys.exit(main())
