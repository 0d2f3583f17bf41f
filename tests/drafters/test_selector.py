"""The injector that scores pairs of a parent and the best candidates of a depth."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, edited, make_drafter
from session_helpers import expansion_of
from test_pipeline import SIZES, decodes_as_plain, plan, run
from typer.testing import CliRunner

from hf_hsdraft import HSDrafter
from hf_hsdraft.cli.main import app
from hf_hsdraft.drafters.hidden_state.quick_weights import QuickWeights


def selecting(target, top_k: int = 5, **fields) -> HSDrafter:
    return make_drafter(target, injector="selector", injector_top_k=top_k, **fields)


def pair_scores(drafter: HSDrafter, logits: list[float], hidden: torch.Tensor, parent: torch.Tensor) -> list[float]:
    """The definition for one node, a token at a time; `parent` is an embedding."""
    injector = drafter.injector
    left = injector.down(injector.norm(parent)) * injector.hidden_proj(injector.hidden_norm(hidden))
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])
    scores = list(logits)
    for token in ranked[: drafter.config.injector_top_k]:
        scores[token] += float(sum(left[i] * injector.up.weight[token, i] for i in range(len(left))))
    return scores


@torch.no_grad()
@pytest.mark.parametrize("likely", [40, 512])
@pytest.mark.parametrize("texts", [1, 2])
def test_trees_score_pairs_by_their_definition(target, tuned, likely, texts):
    """Among the likely tokens too, and each depth by its own candidates."""
    tuned(likely_columns=likely)
    drafter = selecting(target)
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    hidden, nodes = torch.randn(texts, 3, 32), torch.randint(2, VOCAB, (texts, 4))
    expansion = expansion_of(QuickWeights.of(drafter, weights.head), weights, hidden)
    scores = torch.zeros(texts, 4)
    values, columns, parents, _ = expansion.best(3, nodes, torch.zeros(texts, 4, 8), scores, 6)
    whole, _ = expansion(3, nodes, torch.zeros(texts, 4, 8))
    logits = drafter.logits(hidden, weights)
    for text in range(texts):
        few = logits[text].amax(dim=0).topk(likely).indices if likely < VOCAB and texts == 1 else torch.arange(VOCAB)
        for node in range(4):
            known = pair_scores(drafter, logits[text, 2].tolist(), hidden[text, 2], weights.embed(nodes[text, node]))
            torch.testing.assert_close(whole[text, node], torch.tensor(known).log_softmax(-1), atol=1e-4, rtol=1e-4)
            among = torch.tensor(known)[few].log_softmax(-1)
            for place in (parents[text] == node).nonzero().flatten().tolist():
                expected = among[few.tolist().index(int(columns[text, place]))]
                torch.testing.assert_close(values[text, place], expected, atol=1e-4, rtol=1e-4)


def test_there_are_no_more_candidates_than_tokens(target):
    drafter = selecting(target, 50, draft_vocab_size=20)
    assert drafter.injector.reach(torch.randn(3, 20)).all()


@pytest.mark.train
def test_it_is_trained(chatty, tokenizer, tmp_path):
    sizes = SIZES | {"injector": "selector", "injector_top_k": 4}
    run(chatty, tokenizer, plan(tmp_path, drafter=sizes), max_steps=40, eval_steps=40, learning_rate=2e-2)
    figures = edited(tmp_path / "out", "figures.json")["training"]["history"]
    losses = [entry["loss"] for entry in figures if "loss" in entry]
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5]), losses
    assert max(entry["eval_parity"] for entry in figures if "eval_parity" in entry) < 1e-4
    loaded = HSDrafter.from_pretrained(tmp_path / "out")
    assert loaded.config.injector == "selector" and loaded.injector.top_k == 4
    assert decodes_as_plain(chatty, loaded)
    recipe = edited(tmp_path / "out", "training_recipe.json")["training"]
    assert "selector injector" in recipe["drafter"]


def test_the_command_knows_it(tmp_path):
    result = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "out"), "--injector", "magic"])
    assert result.exit_code == 2 and "selector" in result.output
