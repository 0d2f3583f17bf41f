"""`generate(assistant_model=drafter)` emits what plain `generate()` emits, whatever the drafter proposes."""

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from family_helpers import make_lm
from session_helpers import accept, drafted_by, hidden_session
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging

from hf_hsdraft import CausalLMDrafter, HSCandidateGenerator, HSDrafter
from hf_hsdraft.engine import loop
from hf_hsdraft.generate.generate_hook import assisted_decoding
from hf_hsdraft.installation import install
from hf_hsdraft.runtime.misreading import first_divergence

NEW = 24


def options(drafter: HSDrafter, **values) -> HSDrafter:
    for name, value in values.items():
        setattr(drafter.generation_config, name, value)
    return drafter


@pytest.fixture
def good(target) -> CausalLMDrafter:
    """A drafter that is often right, and often wrong."""
    return make_lm(target)


@pytest.fixture(scope="module")
def trained(target) -> HSDrafter:
    """A drafter overfitted to this target's greedy text, so that whole paths are accepted."""
    from hf_hsdraft.training.data.conversations import TokenizedConversation
    from hf_hsdraft.training.data.features import Features
    from hf_hsdraft.training.loss.chains import Pack, sample_chains, true_labels
    from hf_hsdraft.training.loss.loss import ChainLoss
    from hf_hsdraft.training.loss.objectives import OBJECTIVES

    drafter = make_drafter(target, initializer_range=0.02).train()
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    generator = torch.Generator().manual_seed(3)
    features = []
    for _ in range(2):
        start = torch.randint(2, VOCAB, (1, 11), generator=generator)
        ids = target.generate(start, max_new_tokens=40, do_sample=False)[0]
        chat = TokenizedConversation(ids, torch.arange(len(ids)) >= 11)
        states = target(ids[None], output_hidden_states=True).hidden_states
        taps = torch.cat([states[layer][0] for layer in drafter.config.target_tap_layers], dim=-1)
        features.append(Features(chat.input_ids, chat.answer_mask, taps.detach(), states[-1][0].detach()))
    pack = Pack.of(features)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    chains = sample_chains(pack, per_conversation=60, rolled_fraction=1.0, seeds=range(2))
    labels = true_labels(pack, chains, drafter.config.num_draft_steps)
    drafter.loss_function = ChainLoss(
        weights, weights.head, OBJECTIVES["forward_kl"], [1.0] * drafter.config.num_draft_steps
    )
    embeds = weights.embed(pack.input_ids.roll(-1))
    for _ in range(100):
        optimizer.zero_grad()
        output = drafter(pack.taps, embeds, pack.position_ids, chains.starts, pack.document_ids, labels=labels)
        output.loss.loss.backward()
        optimizer.step()
    return drafter.eval()


def assert_plain(target, drafter, prompt, **call):
    """A call's text is plain decoding's; returns its statistics."""
    call = {"max_new_tokens": NEW, "do_sample": False, **call}
    plain = target.generate(prompt, **call)
    output = target.generate(prompt, **call, assistant_model=drafter, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert output.statistics.new_tokens == plain.shape[1] - prompt.shape[1]
    return output.statistics


@pytest.mark.parametrize("reuse", ["none", "ensemble", "resample"])
@pytest.mark.parametrize(("attention", "width"), [("sdpa", 5), ("sdpa", 1), ("eager", 5)])
def test_greedy_text_is_the_targets_own(attention, width, reuse, prompt):
    target = make_target(attention)
    assert_plain(target, options(make_drafter(target), reuse=reuse, beam_width=width), prompt)


@pytest.mark.slow
@pytest.mark.parametrize("reuse", ["none", "ensemble", "resample"])
@pytest.mark.parametrize("width", [1, 5])
def test_a_good_drafter_saves_forwards_and_changes_nothing(target, trained, prompt, width, reuse):
    statistics = assert_plain(target, options(trained, reuse=reuse, beam_width=width), prompt)
    assert statistics.tau > 2.0
    if width == 1:  # a chain reaches its full depth, a tree spends its nodes on breadth
        assert max(statistics.accepted_lengths) == trained.config.num_draft_steps


def test_sampling_with_a_seed_gives_the_same_text(target, good, prompt):
    """The walk draws once per emitted token, as plain decoding does, so even the random stream is the same."""
    settings = {"do_sample": True, "top_k": 12, "top_p": 0.95, "temperature": 0.8, "repetition_penalty": 1.2}
    for seed in range(2):
        torch.manual_seed(seed)
        plain = target.generate(prompt, max_new_tokens=NEW, **settings)
        torch.manual_seed(seed)
        drafted = target.generate(prompt, max_new_tokens=NEW, assistant_model=good, **settings)
        assert drafted.tolist() == plain.tolist()


def test_stateful_logits_processors_see_each_path(target, good, prompt):
    class NoRepeatAfterEven(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if int(input_ids[0, -1]) % 2 == 0:
                scores[:, input_ids[0]] = -torch.inf
            return scores

    assert_plain(target, good, prompt, logits_processor=LogitsProcessorList([NoRepeatAfterEven()]))


@pytest.mark.parametrize("seed", range(3))
def test_sampling_draws_nothing_after_the_end(target, good, prompt, seed):
    """A call without a seed of its own goes on with the random stream that plain decoding would have left."""
    kwargs = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.3, "eos_token_id": list(range(2, VOCAB, 7))}
    streams = []
    for assistant in (None, good):
        torch.manual_seed(seed)
        first = target.generate(prompt, assistant_model=assistant, **kwargs)
        second = target.generate(prompt, assistant_model=assistant, **kwargs)
        streams.append((first.tolist(), second.tolist(), torch.get_rng_state().tolist()))
    assert streams[0] == streams[1]


def test_an_end_that_was_drafted_counts_as_drafted(target, good, prompt):
    plain = target.generate(prompt, max_new_tokens=NEW, do_sample=False)
    statistics = assert_plain(target, good, prompt, eos_token_id=int(plain[0, -1]))
    # Every round adds a token of the target's own, but for a last one that ends with a drafted token.
    missing = 1 + sum(statistics.accepted_lengths) + statistics.rounds - statistics.new_tokens
    assert missing in (0, 1)


@pytest.mark.parametrize("sizes", [{"num_draft_steps": 1}, {"head": "trained", "hidden_size": 16, "head_dim": 4}])
def test_other_shapes_of_drafter(target, prompt, sizes):
    assert_plain(target, make_drafter(target, **sizes), prompt)


def test_a_bfloat16_target_parts_only_at_ties(prompt, drafter):
    target = make_target().to(torch.bfloat16)
    plain = target.generate(prompt, max_new_tokens=NEW, do_sample=False)
    drafted = target.generate(prompt, max_new_tokens=NEW, do_sample=False, assistant_model=drafter)
    divergence = first_divergence(target, prompt.shape[1], plain, drafted)
    assert divergence is None or divergence.margin < 0.05


@torch.no_grad()
@pytest.mark.parametrize("accepted", [0, 1, 2])
@pytest.mark.parametrize("injector", ["path", "low_rank", "selector"])
def test_leftover_states_go_on_predicting_their_positions(target, injector, accepted):
    """Reuse, by brute force: resampling after a tokens is depth a + 1 of the old chain, told the accepted tokens."""
    drafter = options(make_drafter(target, injector=injector), reuse="resample", tree_size=500, beam_width=VOCAB)
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    ids = torch.randint(2, VOCAB, (20,), generator=torch.Generator().manual_seed(9))
    states = target(ids[None], output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer][0] for layer in drafter.config.target_tap_layers], dim=-1)
    generator = hidden_session(drafter, weights)
    accept(generator, taps[:10], ids[1:11], torch.arange(10))
    drafted_by(generator)
    states_before = generator._rows[0].drafted
    root = 11 + accepted  # the bonus token after the accepted ones
    news = taps[10:root], ids[11 : root + 1], torch.arange(10, root)
    accept(generator, *news, accepted=ids[11:root].tolist())
    [tree] = drafted_by(generator)
    path = None
    for token in ids[10 : root + 1]:
        path = drafter.injector.advance(weights.embed(token[None]), path)
    hidden = states_before[accepted + 1][None]
    resampled = drafter.injector.told(drafter.logits(hidden, weights), hidden, path).log_softmax(-1)[0]
    fresh = drafter.logits(generator._rows[0].drafted[:1], weights).log_softmax(-1)[0]
    expected = torch.maximum(resampled, fresh)
    first = {tree.tokens[node]: tree.scores[node] for node in range(1, len(tree)) if tree.depths[node] == 1}
    assert first
    for token, score in first.items():
        assert score == pytest.approx(float(expected[token]), abs=1e-3)
    assert int(resampled.argmax()) in first


def test_chunked_prefill(target, good, prompt):
    assert_plain(target, good, prompt, prefill_chunk_size=4)


def test_options_of_the_call_go_before_the_drafters(target, good, prompt):
    call = {"max_new_tokens": 12, "do_sample": False, "assistant_model": good, "return_dict_in_generate": True}
    assert max(target.generate(prompt, num_assistant_tokens=1, **call).statistics.accepted_lengths) == 1
    assert max(target.generate(prompt, **call).statistics.accepted_lengths) > 1


def test_statistics_add_up(target, good, prompt):
    statistics = assert_plain(target, good, prompt)
    assert statistics.new_tokens == NEW == 1 + sum(statistics.accepted_lengths) + statistics.rounds
    assert statistics.target_forwards == statistics.rounds + 1
    assert statistics.tau == NEW / statistics.target_forwards
    parts = statistics.prefill_seconds + statistics.draft_seconds + statistics.verify_seconds
    assert 0 < parts + statistics.commit_seconds <= statistics.total_seconds


def test_no_clock_is_read_unless_statistics_are_asked_for(target, good, prompt, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("read a clock in a call that did not ask for statistics")

    monkeypatch.setattr(loop.time, "perf_counter", forbidden)
    target.generate(prompt, max_new_tokens=8, do_sample=False, assistant_model=good)


@pytest.mark.parametrize("do_sample", [False, True])
def test_transformers_own_assisted_decoding_takes_our_chains(target, trained, prompt, do_sample, monkeypatch):
    """The same generator as a plain `CandidateGenerator`, in the library's loop."""
    original = type(target)._assisted_decoding.__wrapped__
    drafted = []
    weights = trained.borrow(target.get_input_embeddings(), target.get_output_embeddings())

    class Recorded(HSCandidateGenerator):
        def get_candidates(self, input_ids, **kwargs):
            candidates, logits = super().get_candidates(input_ids, **kwargs)
            drafted.append(candidates.shape[1] - input_ids.shape[1])
            return candidates, logits

    options(trained, beam_width=1, reuse="none")
    monkeypatch.setattr(type(target), "_assisted_decoding", original)
    monkeypatch.setattr(type(target), "_get_candidate_generator", lambda self, **kwargs: Recorded(trained, weights))
    call = {"max_new_tokens": NEW, **({"do_sample": True, "temperature": 0.3} if do_sample else {"do_sample": False})}
    torch.manual_seed(7)
    expected = target.generate(prompt, **call)
    torch.manual_seed(7)
    output = target.generate(prompt, **call, assistant_model=make_target(seed=2))
    assert drafted[0] == 0 and max(drafted) == trained.config.num_draft_steps
    assert len(drafted) < (NEW / 2 if not do_sample else NEW)
    if not do_sample:  # its sampling draws for rejected positions too, so a seed gives another text there
        assert output.tolist() == expected.tolist()


def test_other_assistants_run_the_code_they_ran_before(target, prompt):
    """Byte for byte: a call without a drafter reaches transformers' own function with its arguments untouched."""
    hooked = {name: getattr(GenerationMixin, name) for name in ("_assisted_decoding", "_validate_generation_mode")}
    settings = {"max_new_tokens": 12, "do_sample": False}
    assistant = make_target(seed=2)
    calls = [{"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}, {}]
    with_hook = [target.generate(prompt, **kwargs, **settings).tolist() for kwargs in calls]
    try:
        for name, function in hooked.items():
            setattr(GenerationMixin, name, function.__wrapped__)
        without_hook = [target.generate(prompt, **kwargs, **settings).tolist() for kwargs in calls]
    finally:
        for name, function in hooked.items():
            setattr(GenerationMixin, name, function)
    assert with_hook == without_hook
    arguments = {"assistant_model": assistant, "streamer": None, "inputs_tensor": prompt}
    seen = assisted_decoding(lambda *args, **kwargs: (args, kwargs), target, prompt, **arguments)
    assert seen == ((target, prompt), arguments)
    install()
    assert hooked == {name: getattr(GenerationMixin, name) for name in hooked}, "wrapped once"


def test_beam_search_stays_what_transformers_makes_of_it(target, drafter, prompt, caplog):
    settings = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    plain = target.generate(prompt, **settings)
    stranger = make_drafter(make_target(hidden_size=64))
    library = logging.get_logger("transformers")
    library.addHandler(caplog.handler)
    try:
        for assistant in (drafter, stranger):  # not used, so not checked either
            caplog.clear()
            assert target.generate(prompt, assistant_model=assistant, **settings).tolist() == plain.tolist()
            assert "assistant" in caplog.text
    finally:
        library.removeHandler(caplog.handler)


def test_reuse_of_an_earlier_version_is_left_out_with_a_word(target, drafter, prompt, monkeypatch):
    warned = []
    monkeypatch.setattr("hf_hsdraft.drafters.hidden_state.draft_session.logger.warning_once", warned.append)
    assert_plain(target, options(drafter, reuse="skip"), prompt, max_new_tokens=12)
    assert "reuse='skip' is gone" in warned[0]


def test_generation_config_objects_work(target, good, prompt):
    config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    plain = target.generate(prompt, generation_config=config)
    assert target.generate(prompt, generation_config=config, assistant_model=good).tolist() == plain.tolist()
