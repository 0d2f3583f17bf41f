"""Static caches: drafts in slots of a fixed size, one shape of forward, and what is compiled of it."""

from collections.abc import Iterator

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target, scripted
from oracles.device_reads import host_reads
from oracles.forced_drafter import ForcedDrafter, let_count, pattern
from transformers import AutoModelForCausalLM, CompileConfig, Qwen2Config, StaticCache

from hf_hsdraft import harmless
from hf_hsdraft.core.cache_name import CACHE
from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.engine.decoded_texts import DecodedTexts
from hf_hsdraft.runtime.static_cache import why_not_static
from hf_hsdraft.runtime.target_runtime import TargetRuntime
from hf_hsdraft.verify import verdict

TREE_SIZE = 24  # no scripted tree of four levels is greater
SETTINGS = ({"do_sample": False}, {"do_sample": True, "temperature": 1.5, "top_k": 20})


@pytest.fixture(scope="module")
def drafter(target):
    return make_drafter(target, tree_size=TREE_SIZE)


@pytest.fixture
def prompts() -> dict[str, torch.Tensor]:
    """A batch of three, padded at the left."""
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, :4], mask[2, :1] = 0, 0
    return {"input_ids": torch.randint(2, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1)) * mask} | {
        "attention_mask": mask
    }


def decode(target, ids, drafter=None, new_tokens=20, **kwargs):
    torch.manual_seed(7)
    inputs = ids if isinstance(ids, dict) else {"input_ids": ids}
    if drafter is not None:
        kwargs |= {"assistant_model": drafter, "return_dict_in_generate": True}
    return target.generate(**inputs, max_new_tokens=new_tokens, **{"do_sample": False, **kwargs})


class Graphs:
    """A backend that runs what it is given, and keeps the shapes of its inputs."""

    def __init__(self) -> None:
        self.shapes: list[list[tuple[int, ...]]] = []

    def config(self) -> CompileConfig:
        def backend(graph, inputs, **kwargs):
            assert not any(isinstance(one, int | torch.SymInt) for one in inputs), "a shape has become a variable"
            self.shapes.append([tuple(one.shape) for one in inputs if isinstance(one, torch.Tensor)])
            return graph.forward

        config = CompileConfig(backend=backend)
        config._compile_all_devices = True
        return config

    def count(self, columns: int) -> int:
        """Graphs that read so many columns: their mask says so."""
        return sum(any(len(s) == 4 and s[-2] == columns and s[1] == 1 for s in shapes) for shapes in self.shapes)


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_text_is_that_of_plain_decoding(drafter, prompt, settings, attention):
    target = make_target(attention)
    plain = decode(target, prompt, **settings)
    assert decode(target, prompt, drafter, cache_implementation="static", **settings).sequences.equal(plain)
    output = decode(target, prompt, scripted(drafter, plain[:, 11:]), cache_implementation="static", **settings)
    assert output.sequences.equal(plain)
    assert output.statistics.tau > 1.8 and output.statistics.draft_kind == "tree"
    assert int(output.past_key_values.get_seq_length()) == plain.shape[1] - 1


def test_batches_with_padding(target, drafter, prompts):
    plain = decode(target, prompts)
    drafter = make_drafter(target, tree_size=5 * TREE_SIZE)
    output = decode(target, prompts, scripted(drafter, plain[:, 9:]), cache_implementation="static")
    assert output.sequences.equal(plain) and output.statistics.tau > 1.5
    short = StaticCache(target.config, max_cache_len=plain.shape[1])
    with pytest.raises(ValueError, match="max_cache_len=29; with a drafter this batch needs 55"):
        decode(target, prompts, drafter, past_key_values=short)


@pytest.mark.parametrize("spare", [0, 1, 10, 60])
def test_a_cache_of_the_callers_own_is_used_as_far_as_it_reaches(target, drafter, prompt, spare):
    """The prompt's probe and each draft need room behind the text; without it, the text goes on token by token."""
    plain = decode(target, prompt)
    cache = StaticCache(target.config, max_cache_len=plain.shape[1] - 1 + spare)
    output = decode(target, prompt, scripted(drafter, plain[:, 11:]), past_key_values=cache)
    assert output.past_key_values is cache and output.sequences.equal(plain)
    assert (output.statistics.tau > 1.8) == (spare == 60)


def test_hardly_any_room(target, drafter, prompt):
    plain = decode(target, prompt, new_tokens=3)
    cache = StaticCache(target.config, max_cache_len=prompt.shape[1] + 2)
    assert decode(target, prompt, drafter, new_tokens=3, past_key_values=cache).sequences.equal(plain)


def test_a_cache_goes_on_to_the_next_call(target, drafter, prompt):
    cache = StaticCache(target.config, max_cache_len=200)
    first = decode(target, prompt, drafter, past_key_values=cache).sequences
    longer = torch.cat([first, prompt], dim=1)
    plain = decode(target, longer)
    second = decode(target, longer, scripted(drafter, plain[:, longer.shape[1] :]), past_key_values=cache).sequences
    assert second.equal(plain)
    assert decode(target, torch.cat([plain, prompt], dim=1), past_key_values=cache).equal(
        decode(target, torch.cat([plain, prompt], dim=1))
    )


@pytest.mark.parametrize("layer", [0, 1])
def test_a_forward_that_stops_halfway_leaves_the_cache_as_it_was(target, drafter, prompt, layer):
    cache = StaticCache(target.config, max_cache_len=200)
    calls = []

    def interrupt(*args):
        calls.append(args)
        if len(calls) == 12:
            raise KeyboardInterrupt

    hook = target.model.layers[layer].self_attn.register_forward_hook(harmless(interrupt))
    try:
        with pytest.raises(KeyboardInterrupt):
            decode(target, prompt, drafter, past_key_values=cache)
    finally:
        hook.remove()
    lengths = {int(each.cumulative_length) for each in cache.layers}
    assert len(lengths) == 1 and lengths.pop() >= prompt.shape[1]
    plain = decode(target, prompt)
    assert decode(target, plain, drafter, past_key_values=cache).sequences.equal(decode(target, plain))


def test_hidden_states_and_attentions_are_those_of_plain_decoding(drafter, prompt):
    target = make_target("eager")
    wanted = {"output_hidden_states": True, "output_attentions": True, "return_dict_in_generate": True}
    plain = decode(target, prompt, **wanted)
    output = decode(target, prompt, scripted(drafter, plain.sequences[:, 11:]), cache_implementation="static", **wanted)
    for expected, seen in zip(plain.hidden_states, output.hidden_states, strict=True):
        torch.testing.assert_close(torch.stack(seen), torch.stack(expected), rtol=1e-3, atol=1e-4)
    for expected, seen in zip(plain.attentions, output.attentions, strict=True):
        for ours, theirs in zip(seen, expected, strict=True):
            size = theirs.shape[-1]
            torch.testing.assert_close(ours[..., :size], theirs, rtol=1e-3, atol=1e-4)
            assert not ours[..., size:].any()


def test_caches_that_overwrite_are_refused(drafter, prompt):
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "sliding_window": 8, "use_sliding_window": True}
    windowed = AutoModelForCausalLM.from_config(Qwen2Config(**fields, max_window_layers=1, eos_token_id=None)).eval()
    with pytest.raises(ValueError, match=r"StaticSlidingWindowLayer\) overwrite what is needed"):
        decode(windowed, prompt, make_drafter(windowed), cache_implementation="static")


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(), reason="such a cache asks for a CUDA driver"
)
def test_offloaded_static_caches_are_refused():
    config = make_target().config
    assert "offloaded" in why_not_static(StaticCache(config, max_cache_len=8, offloading=True))


def test_calls_keep_the_length_of_the_cache(prompt):
    """A longer cache for drafts is not made longer still by the next call; plain decoding takes it too."""
    target = make_target()
    drafter = make_drafter(target, tree_size=TREE_SIZE)
    lengths = [
        decode(target, prompt, drafter, tokens, cache_implementation="static").past_key_values.get_max_length()
        for tokens in (20, 20, 10)
    ]
    needed = prompt.shape[1] + 20 - 1 + TREE_SIZE + 1
    assert lengths == [needed + -needed % 8] * 3
    plain = decode(target, prompt, cache_implementation="static", return_dict_in_generate=True)
    assert plain.past_key_values.get_max_length() == lengths[0]


def test_verification_is_compiled_once(prompt, graphs):
    """One graph of the forward and one of the move, whatever the trees are, and one of a round that drafts nothing."""
    target = make_target(num_hidden_layers=2)
    drafter = make_drafter(target, tree_size=TREE_SIZE)
    call = {"cache_implementation": "static", "compile_config": graphs.config()}
    for seed, settings in enumerate(SETTINGS):  # the second call compiles nothing
        plain = decode(target, prompt, **settings)
        output = decode(target, prompt, scripted(drafter, plain[:, 11:], seed), **call, **settings)
        assert output.sequences.equal(plain) and output.statistics.tau > 1.8
        # The forward, the move, and a plain step once there was one.
        assert graphs.count(TREE_SIZE + 1) == 1 and graphs.count(1) <= 1 and len(graphs.shapes) == 2 + graphs.count(1)
    # Plain decoding's step leaves ours as they are.
    assert decode(target, prompt, **call, **settings).equal(plain)
    graphs_of_both = len(graphs.shapes)
    assert graphs.count(TREE_SIZE + 1) == 1 and graphs_of_both == 2 + graphs.count(1) <= 4  # at most its own step
    for _ in range(2):  # a drafter of hidden states brings one more, once
        assert decode(target, prompt, drafter, **call, **settings).sequences.equal(plain)
        assert len(graphs.shapes) == graphs_of_both + 1


@pytest.mark.slow
def test_a_full_cache_is_decoded_by_compiled_steps(prompt, graphs):
    """Verification and single steps: two shapes, also if plain decoding was compiled before."""
    target = make_target()
    drafter = make_drafter(target, tree_size=TREE_SIZE)
    plain = decode(target, prompt, new_tokens=40)
    config = graphs.config()
    assert decode(target, prompt, new_tokens=40, cache_implementation="static", compile_config=config).equal(plain)
    cache = StaticCache(target.config, max_cache_len=plain.shape[1] - 1)
    output = decode(target, prompt, scripted(drafter, plain[:, 11:]), 40, past_key_values=cache, compile_config=config)
    assert output.sequences.equal(plain)
    assert graphs.count(TREE_SIZE + 1) == 1 and len(graphs.shapes) <= 4


@pytest.mark.parametrize("other", [{"disable_compile": True}, {"cache_implementation": None}])
def test_nothing_is_compiled_where_plain_decoding_compiles_nothing(target, drafter, prompt, graphs, other):
    call = {"cache_implementation": "static", "compile_config": graphs.config(), **other}
    assert decode(target, prompt, drafter, **call).sequences.equal(decode(target, prompt))
    assert graphs.shapes == []


def test_plain_compiled_decoding_keeps_one_graph(prompt, graphs):
    """Our hook into sdpa reads a context variable, which a traced forward must not see."""
    target = make_target(num_hidden_layers=1)
    decode(target, prompt, new_tokens=4, cache_implementation="static", compile_config=graphs.config())
    assert len(graphs.shapes) == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_a_round_of_the_target_reads_nothing_back(target, prompts, rows):
    """Between a draft and its logits, and between the accepted path and the next draft, the host never waits.

    Counted on the target's side, `verify` and `commit`: values that Python reads of tensors, operators whose result
    depends on them in size, and tensors copied to the device in a way that waits for it.
    """
    inputs = {name: value[:rows] for name, value in prompts.items()}
    generation_config = target.generation_config
    kwargs = {CACHE: StaticCache(target.config, max_cache_len=200), "use_cache": True, **inputs}
    kwargs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    ids = kwargs.pop("input_ids")
    runtime = TargetRuntime(target, [1, 2], kwargs)
    with torch.no_grad():
        runtime.prefill(ids, generation_config)
        assert not runtime.prepare_trees()
        runtime.make_room(TREE_SIZE + 1)
        tree = DraftTree((5, 6, 7, 8, 9), (-1, 0, 0, 2, 3), (0, 1, 1, 2, 3), (0.0,) * 5)
        for path in ([2, 3], [], [1], [2, 3, 4]):
            paths = [path, None, [1]][:rows]
            with host_reads() as seen:
                mark = runtime.slots.mark()
                runtime.verify([tree] * rows, ids)
                runtime.commit(paths)
            assert not seen
            assert runtime.length >= mark.slots + 1 + len(path)
        with host_reads() as seen:
            runtime.slots.roll_back(mark)
        assert not seen
    assert int(runtime.cache.get_seq_length()) == runtime.length


@pytest.mark.parametrize("eos", [None, 4])
def test_a_round_reads_the_choices_of_the_target_and_nothing_else(prompt, monkeypatch, eos):
    """Greedily: one read of the nodes' choices, of which the accepted path and the end of the text follow."""
    monkeypatch.setattr(verdict, "_reads_are_free", lambda values: False)  # as on a device
    target = let_count(make_target(eos_token_id=eos, pad_token_id=0, hidden_size=128))
    seen = []

    def counted(method):
        def call(*args, **kwargs):
            with host_reads() as reads:
                result = method(*args, **kwargs)
            seen.append((method.__name__, dict(reads)))
            return result

        return call

    for name in ("judge", "emit", "last_token"):
        monkeypatch.setattr(DecodedTexts, name, counted(getattr(DecodedTexts, name)))
    drafter = make_drafter(target, tree_size=TREE_SIZE)
    decode(target, prompt, ForcedDrafter(drafter, [2, 0, 1]), 20, cache_implementation="static")
    assert {name for name, _ in seen} == {"judge", "emit", "last_token"} and len(seen) > 9
    assert all(reads == ({"tolist": 1} if name == "judge" else {}) for name, reads in seen)


@pytest.mark.parametrize("call", [{}, {"cache_implementation": "static"}])
def test_a_pattern_of_acceptance_is_forced(prompt, call):
    """Whatever the drafter proposes; the tree keeps its size, and the paths are committed by moving their nodes."""
    target = let_count(make_target(hidden_size=128, num_hidden_layers=2))
    drafter = make_drafter(target, tree_size=TREE_SIZE)
    output = decode(target, prompt, ForcedDrafter(drafter, [0, 3, 1]), 31, **call)
    statistics, text = output.statistics, output.sequences[0, prompt.shape[1] - 1 :]
    assert text.equal((text[0] + torch.arange(len(text))) % VOCAB)
    assert statistics.accepted_lengths[:-1] == ([0, 3, 1] * 5)[: statistics.rounds - 1]
    assert statistics.drafted_nodes[3] == TREE_SIZE


def test_a_pattern_has_the_rate_that_was_asked_for():
    for rate in (0.0, 0.6, 0.8, 1.0):
        lengths = pattern(rate, 4, 1000)
        shares = [sum(length >= depth for length in lengths) / 1000 for depth in range(1, 5)]
        assert shares == pytest.approx([rate**depth for depth in range(1, 5)], abs=2e-3)
