"""Attention of few queries by our operator: what the formula gives in float64, in any layout."""

import pytest
import torch
import torch.nn.functional as F

from hf_hsdraft.cpu import few_queries, grouped_attention
from hf_hsdraft.cpu.few_queries import FEW_QUERIES
from hf_hsdraft.cpu.small_weights import KERNEL

FOUND = KERNEL.operators(wait=True)
pytestmark = pytest.mark.skipif(FOUND is None, reason="no compiler, or another processor")
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 5e-3}  # half a unit in the last place of bfloat16 is 4e-3


@pytest.fixture(autouse=True)
def without_tiles(monkeypatch):
    """As on processors without AMX, where torch's kernel is not used for bfloat16 either."""
    monkeypatch.setattr(few_queries, "_most_queries", lambda dtype: FEW_QUERIES)


def a_layer(batch=1, heads=6, key_heads=2, n=5, length=100, size=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n + length)
    query = torch.randn(batch, n, heads, size, generator=generator).to(dtype).transpose(1, 2)
    room = torch.randn(2, batch, key_heads, length + 30, size, generator=generator).to(dtype)
    key, value = room[:, :, :, :length]  # views of a cache with room to grow
    seen = torch.rand(batch, 1, n, length, generator=generator) < 0.7
    seen[..., 0] = True
    return query, key, value, seen


def by_the_formula(query, key, value, mask, scaling):
    groups = query.shape[1] // key.shape[1]
    key, value = (each.double().repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    return (scores.softmax(-1) @ value).transpose(1, 2)


def check(query, key, value, mask, scaling=0.3):
    found = few_queries.attend_few(query, key, value, mask, scaling)
    expected = by_the_formula(query, key, value, mask, scaling)
    assert found.is_contiguous() and found.dtype == query.dtype
    assert (found.double() - expected).norm() <= ERRORS[query.dtype] * expected.norm()


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("length", [1, 15, 16, 63, 64, 65, 300])
@pytest.mark.parametrize("n", [1, 2, 7, 25])
def test_any_number_of_keys_and_queries(dtype, length, n):
    check(*a_layer(n=n, length=length, dtype=dtype))


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(("n", "length"), [(1, 9), (5, 5), (64, 64), (130, 130), (25, 90)])
@pytest.mark.parametrize("heads", [2, 6])
def test_without_a_mask_queries_see_the_keys_before_them(dtype, n, length, heads):
    query, key, value, _ = a_layer(2, heads, n=n, length=length, dtype=dtype)
    found = FOUND.attend(query, key, value, None, 0.3)
    seen = torch.ones(n, length, dtype=torch.bool).tril(length - n)
    expected = by_the_formula(query, key, value, seen, 0.3)
    assert (found.double() - expected).norm() <= ERRORS[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (9, 3), (8, 1)])
def test_heads_of_any_size_in_a_batch(dtype, size, heads, key_heads):
    check(*a_layer(3, heads, key_heads, size=size, dtype=dtype))


@pytest.mark.parametrize("dtype", ERRORS)
def test_masks_are_bool_or_added_and_may_be_shared(dtype):
    query, key, value, seen = a_layer(2, dtype=dtype)
    added = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    biased = added + torch.randn(seen.shape).to(dtype)
    for mask in (seen[:1], added, biased, biased.float(), biased[:1]):
        check(query, key, value, mask)
    check(*a_layer(2, n=1, dtype=dtype)[:3], None)


def test_large_scores_and_late_highest_ones_are_kept_apart():
    query, key, value, _ = a_layer(n=2, length=200)
    key[:, :, 150] *= 40  # far above all scores of the blocks before
    check(query, key, value, torch.ones(1, 1, 2, 200, dtype=torch.bool), 1.0)


def test_a_query_that_sees_nothing_gets_what_torch_gives_it():
    query, key, value, seen = a_layer(n=3)
    seen[:, :, 1] = False
    expected = F.scaled_dot_product_attention(query, key, value, seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(few_queries.attend_few(query, key, value, seen, None), expected, equal_nan=True)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", range(3))
def test_numbers_of_a_broken_target_stay_broken(number, part):
    layer = list(a_layer(length=70))
    layer[3][..., 65] = True
    place = (0, 1, 2, 3) if part == 0 else (0, 1, 65, 3)  # of a query; of a key or value in the second block
    layer[part] = layer[part].clone()
    layer[part][place] = number
    found, expected = few_queries.attend_few(*layer, None), by_the_formula(*layer, 64**-0.5)
    torch.testing.assert_close(found.isfinite(), expected.isfinite())


def test_no_queries_or_texts_give_nothing():
    query, key, value, seen = a_layer()
    assert few_queries.attend_few(query[:, :, :0], key, value, seen[:, :, :0], None).shape == (1, 0, 6, 64)
    assert few_queries.attend_few(query[:0], key[:0], value[:0], seen, None).shape == (0, 5, 6, 64)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_each_thread_gets_its_share(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for n in (1, 9, 30):
            check(*a_layer(n=n))
            check(*a_layer(heads=4, key_heads=1, n=n))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, m: (q[..., :24], k[..., :24], v[..., :24], m),  # no whole vectors
        lambda q, k, v, m: (q, k, v[..., :32], m),
        lambda q, k, v, m: (q.half(), k.half(), v.half(), m),
        lambda q, k, v, m: (q, k.transpose(2, 3).contiguous().transpose(2, 3), v, m),  # numbers of a key apart
        lambda q, k, v, m: (q, k, v, m[:, :, :1].expand(-1, 6, -1, -1)),  # a mask for each head
        lambda q, k, v, m: (q, k, v, m[..., :1].expand_as(m)),
        lambda q, k, v, m: (q.requires_grad_(), k, v, m),
        lambda q, k, v, m: (q, k, v, m[0, 0]),
    ],
)
def test_what_does_not_fit_is_left_to_torch(change):
    changed = change(*a_layer())
    assert few_queries.attend_few(*changed, None) is None
    if changed[2].shape == changed[1].shape and changed[0].dtype == torch.float32 and changed[3].dim() == 4:
        found = grouped_attention.attend(*changed, None)
        groups = changed[0].shape[1] // changed[1].shape[1]
        mask = changed[3] if changed[3].shape[2] > 1 else changed[3].expand(-1, -1, 5, -1)
        key, value = (each.repeat_interleave(groups, dim=1) for each in changed[1:3])
        expected = F.scaled_dot_product_attention(changed[0], key, value, mask).transpose(1, 2)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_trial_notices_wrong_results(monkeypatch):
    class Wrong:
        def attend(self, query, key, value, mask, scaling):
            return FOUND.attend(query, key, value, mask, scaling + 0.2)

    for dtype in ERRORS:
        assert few_queries._attends(dtype)
    monkeypatch.setattr(KERNEL, "operators", Wrong)
    for dtype in ERRORS:
        assert not few_queries._attends(dtype)
