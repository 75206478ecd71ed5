import pytest
import torch
from hypothesis import given, settings, strategies as st

from dovetail.base.errors import NonFiniteError, SpecError
from dovetail.decoding.generation import generate_batch, generate_tokens
from dovetail.decoding.sampling import Sampling, adjusted, most_probable, sample_tokens, sampled_probs
from dovetail.decoding.steps import Decoder
from dovetail.files.spec import from_yaml, load_spec
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.state.pool import Pool

PROMPT = torch.tensor([5, 17, 3, 60])
TINY = """
width: 28
vocab: 62
head: {kind: lm, tied: false}
layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
"""


def lively(spec):
    """A model whose initial weights are large enough for every part to matter; of this seed the output varies."""
    model = build(spec, seed=3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(8.0)
    return model


@pytest.fixture(scope="module")
def model():
    return lively(from_yaml(TINY))


@torch.no_grad()
def test_cached_generation_equals_recomputing_the_whole_sequence(model):
    written = list(generate_tokens(model, PROMPT, 12))
    text = PROMPT
    for token in written:
        logits = model(text[None], Ctx(layout=TokenLayout.whole(1, len(text))))[0, -1]
        assert token == int(logits.argmax())
        text = torch.cat([text, torch.tensor([token])])
    assert len(set(written)) > 3


@torch.no_grad()
def test_an_encoder_decoder_reads_the_prompt_once_and_begins_with_its_own_token():
    model = lively(load_spec("t5-tiny").set("vocab", 62).set("encoder.vocab", 62))
    written = list(generate_tokens(model, PROMPT, 8, start=[0]))
    encoder_output, layout = model.encode(PROMPT[None], Ctx(layout=TokenLayout.whole(1, len(PROMPT))))
    text = [0]
    for token in written:
        ctx = Ctx(layout=TokenLayout.whole(1, len(text)), encoder_output=encoder_output, encoder_layout=layout)
        assert token == int(model(torch.tensor([text]), ctx)[0, -1].argmax())
        text.append(token)
    with pytest.raises(SpecError, match="needs a first decoder token"):
        next(generate_tokens(model, PROMPT, 8))


def test_a_seed_generates_the_same_again(model):
    one, two, other = (list(generate_tokens(model, PROMPT, 20, Sampling(temperature=2.0, seed=seed))) for seed in (1, 1, 2))
    assert one == two
    assert one != other
    greedy = list(generate_tokens(model, PROMPT, 20))
    assert list(generate_tokens(model, PROMPT, 20, Sampling(temperature=2.0, top_k=1))) == greedy
    assert list(generate_tokens(model, PROMPT, 20, Sampling(temperature=2.0, top_p=1e-9))) == greedy
    for colder in (1e-30, 1e-45, 1e-320):  # logits divided by these are infinite in float32
        assert list(generate_tokens(model, PROMPT, 20, Sampling(temperature=colder))) == greedy
    assert list(generate_tokens(model, PROMPT, 0)) == []


def test_it_stops_behind_a_stop_token(model):
    greedy = list(generate_tokens(model, PROMPT, 12))
    end = greedy[5]
    assert list(generate_tokens(model, PROMPT, 12, stop={end})) == greedy[: greedy.index(end) + 1]


@pytest.mark.parametrize("lengths", [(4, 4, 4), (2, 4, 3)])
@pytest.mark.parametrize("how", [{}, {"temperature": 2.0, "seed": 1}])
def test_a_batch_generates_what_each_prompt_does_alone(model, lengths, how):
    prompts = [torch.randint(62, (n,), generator=torch.Generator().manual_seed(n + i)).tolist() for i, n in enumerate(lengths)]
    alone = [list(generate_tokens(model, prompt, 9, Sampling(**how))) for prompt in prompts]
    assert alone[0] != alone[1]
    decoder = Decoder(model, Pool(model.part, len(prompts), 4 + 9))
    for some in (prompts, prompts[::-1], prompts[:2]):  # again with the same decoder, in other rows, with a row left empty
        together = list(generate_batch(decoder, some, 9, Sampling(**how)))
        assert [list(row) for row in zip(*together, strict=True)] == [alone[prompts.index(one)] for one in some]


def test_a_row_of_a_batch_ends_behind_a_stop_token_and_the_batch_with_its_last_row(model):
    prompts = [[5, 17, 3, 60], [9, 2, 44, 1]]
    alone = [list(generate_tokens(model, prompt, 12)) for prompt in prompts]
    stop = {alone[0][2], alone[1][6]}
    ends = [min(row.index(token) for token in stop if token in row) + 1 for row in alone]
    assert ends[0] != ends[1]
    steps = list(generate_batch(Decoder(model, Pool(model.part, 2, 16)), prompts, 12, stop=stop))
    assert len(steps) == max(ends)
    for row, (want, end) in enumerate(zip(alone, ends, strict=True)):
        assert [step[row] for step in steps] == want[:end] + [None] * (max(ends) - end)


def test_batches_that_cannot_be_generated_are_refused(model):
    decoder = Decoder(model, Pool(model.part, 2, 16))
    for prompts in ([], [[1], []]):
        with pytest.raises(SpecError, match="prompts"):
            next(generate_batch(decoder, prompts, 3))
    t5 = build(load_spec("t5-tiny"))
    with pytest.raises(SpecError, match="an encoder–decoder is not decoded in a batch"):
        next(generate_batch(Decoder(t5, Pool(t5.part, 1, 16, source=4)), [[1, 2]], 3))


@pytest.mark.slow
def test_tokens_are_drawn_as_often_as_they_are_likely():
    probs = torch.tensor([0.3, 0.5, 0.05, 0.15])

    def measured(**how):
        rows = [Sampling(**how, seed=seed) for seed in range(8000)]
        drawn = torch.tensor(sample_tokens(probs.log().expand(8000, 4), rows, [()] * 8000, [()] * 8000))
        histories = [range(i) for i in range(8000)]
        later = torch.tensor(sample_tokens(probs.log().expand(8000, 4), rows[:1] * 8000, [()] * 8000, histories))
        torch.testing.assert_close(drawn.bincount(minlength=4) / 8000, later.bincount(minlength=4) / 8000, atol=0.025, rtol=0)
        return drawn.bincount(minlength=4) / 8000

    sharp = probs**2 / (probs**2).sum()
    two = torch.tensor([0.375, 0.625, 0, 0])
    torch.testing.assert_close(measured(temperature=1.0), probs, atol=0.017, rtol=0)  # three standard deviations
    torch.testing.assert_close(measured(temperature=0.5), sharp, atol=0.017, rtol=0)
    torch.testing.assert_close(measured(temperature=1.0, top_k=2), two, atol=0.017, rtol=0)
    torch.testing.assert_close(measured(temperature=1.0, top_p=0.7), two, atol=0.017, rtol=0)
    torch.testing.assert_close(measured(temperature=1.0, top_p=0.5), torch.tensor([0.0, 1, 0, 0]), atol=0, rtol=0)
    assert measured(temperature=1.0, top_p=0.81)[3] > 0
    torch.testing.assert_close(measured(temperature=1.0, min_p=0.5), two, atol=0.017, rtol=0)


def test_penalties_and_biases_change_logits_as_the_reference_libraries_do():
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0])
    how = Sampling(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={2: 4.0})
    got = adjusted(logits, how, prompt=[0], generated=[1, 1])
    assert got.tolist() == [1.0, -2.0 - 0.25 - 1.0, 4.5, 3.0]
    assert logits.tolist() == [2.0, -1.0, 0.5, 3.0]
    assert sample_tokens(logits[None], [how], [[0]], [[1, 1]]) == [2]


def test_a_row_is_sampled_alike_in_any_batch():
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(0))
    hows = [Sampling(temperature=0.5 + i, top_p=0.7 + 0.05 * i, seed=i) for i in range(5)]
    histories = [list(range(i)) for i in range(5)]
    together = sample_tokens(logits, hows, [()] * 5, histories)
    assert together == [sample_tokens(logits[i : i + 1], [hows[i]], [()], [histories[i]])[0] for i in range(5)]


def test_the_most_probable_token_is_the_first_of_equal_logits_in_every_row():
    logits = torch.randn(5, 3001, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # with ties
    logits[1, [7, 2900]] = 9.0
    logits[2] = 0.0
    logits[3, 0] = logits[3, -1] = float("inf")
    logits[4] = -float("inf")
    logits[4, 3000] = -3.0
    first = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert most_probable(logits) == first == logits.max(-1).indices.tolist()
    assert first[1:] == [7, 0, 0, 3000]
    transposed = logits.t().contiguous().t()
    assert most_probable(transposed) == first
    assert sample_tokens(logits, [Sampling()] * 4 + [Sampling(logit_bias={0: 0.0})], [()] * 5, [()] * 5) == first


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0])
def test_top_p_is_that_of_a_full_sort(top_p, spread):
    logits = spread * torch.randn(3000, generator=torch.Generator().manual_seed(1)).round(decimals=1)  # with ties
    probs = logits.softmax(-1)
    values, order = probs.sort(descending=True, stable=True)
    kept = order[values.cumsum(-1) - values < top_p]
    got = sampled_probs(logits, Sampling(temperature=1.0, top_p=top_p)).nonzero()[:, 0]
    assert abs(len(got) - len(kept)) <= 1  # the sums round in another order
    assert probs[got].min() >= probs[kept].min() * (1 - 1e-6)


@given(
    st.lists(st.floats(-40, 40, width=32, allow_subnormal=False), min_size=1, max_size=9),  # torch may read those as 0
    st.floats(0.01, 3),
    st.floats(0, 1) | st.just(1.0),
    st.floats(0.001, 1) | st.just(1.0),
    st.integers(1, 9),
)
@settings(max_examples=200, deadline=None)
def test_every_legal_filter_leaves_the_most_probable_token_and_no_more_than_a_looser_one(
    logits, temperature, min_p, top_p, top_k
):
    x = torch.tensor(logits)
    left = sampled_probs(x, Sampling(temperature=temperature, min_p=min_p, top_p=top_p, top_k=top_k))
    assert left[x.argmax()] > 0
    assert (x > x[left > 0].min()).sum() < top_k  # of equal ones more may stay
    for looser in ({"min_p": 0.0, "top_k": top_k}, {"min_p": min_p, "top_k": None}):
        more = sampled_probs(x, Sampling(temperature=temperature, **looser))
        assert (more[left > 0] > 0).all()


@pytest.mark.parametrize("top_k", [None, 1, 3, 8])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.8, 0.99])
def test_top_p_is_of_the_tokens_that_the_other_filters_leave(top_p, min_p, top_k):
    """Its fewest tokens, each as probable among them as before."""
    draw = torch.Generator().manual_seed(5)
    for spread in (0.1, 0.5, 1.0, 2.0):
        x = spread * torch.randn(40, generator=draw)
        left, before = (
            sampled_probs(x, Sampling(temperature=0.7, min_p=min_p, top_k=top_k, top_p=p)).double() for p in (top_p, 1.0)
        )
        kept, before = left > 0, before / before.sum()
        assert before[kept].sum() >= top_p - 1e-5
        assert before[kept].sum() - before[kept].min() < top_p + 1e-5
        torch.testing.assert_close(left[kept] / left.sum(), before[kept] / before[kept].sum(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "how", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_illegal_sampling_settings_are_refused(how):
    with pytest.raises(SpecError):
        Sampling(**how)


def test_models_that_cannot_generate_raise(model):
    both = from_yaml(TINY).set("layers.*.mixer.mask", "full")
    for spec, path in ((both, "layers"), (from_yaml(TINY).set("head", None), "head")):
        with pytest.raises(SpecError) as refused:
            next(generate_tokens(build(spec), PROMPT, 3))
        assert refused.value.path == path
    with pytest.raises(SpecError, match="prompt"):
        next(generate_tokens(model, [], 3))
    short = from_yaml(TINY).set("position", {"kind": "learned", "length": 6}).set("layers.*.mixer.position", "none")
    assert len(list(generate_tokens(build(short), PROMPT[:4], 9))) == 2, "a table of six positions ends after two more tokens"
    with pytest.raises(SpecError, match="at most 6"):
        next(generate_tokens(build(short), [1, 2, 3, 4, 5, 6], 9))


def test_logits_that_overflow_are_an_error():
    model = lively(from_yaml(TINY))
    with torch.no_grad():
        model.head.out.weight[7].fill_(3e38)  # a finite weight; its products are not
    with pytest.raises(NonFiniteError, match=r"logits of token 1: holds (nan|inf|-inf); the activations overflow"):
        next(generate_tokens(model, PROMPT, 3))
