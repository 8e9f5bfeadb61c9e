from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.plan import AdmittedRequest
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.execution.sampler import RequestState, Sampler, uniform_at
from backfill.execution.shaping import add_biases, exclude, penalise
from backfill.kernels.base import Kernels
from backfill.kernels.cpu import CpuKernels
from backfill.kernels.sampling import _invert_cdf
from tests.kernels.reference import ReferenceKernels
from tests.shared import examples

VOCAB = 3000  # more than the sampler's candidates, so that whole rows are sorted too
END = 2
KERNELS: list[Kernels] = []


@pytest.fixture(scope="module", autouse=True, params=[ReferenceKernels, CpuKernels])
def kernels(request: pytest.FixtureRequest) -> None:
    KERNELS[:] = [request.param()]


def make_sampler() -> Sampler:
    return Sampler(KERNELS[0], [END])


def make_state(
    prompt: tuple[int, ...] = (5, 6), outputs: tuple[int, ...] = (), **sampling: Any
) -> RequestState:
    params = SamplingParams(**{"max_tokens": 50, "temperature": 1.0, **sampling})
    state = RequestState(AdmittedRequest(RequestId("r"), prompt, params))
    for token_id in outputs:
        state.append(token_id)
    return state


def make_logits(num_rows: int = 1, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def sample_ids(logits: torch.Tensor, *states: RequestState) -> list[int]:
    return [token_id for token_id, _ in make_sampler().sample(logits, states)]


def kept_tokens(logits: torch.Tensor, num_draws: int = 400, **sampling: Any) -> set[int]:
    states = [make_state(**sampling, seed=seed) for seed in range(num_draws)]
    return set(sample_ids(logits.repeat(num_draws, 1), *states))


def test_greedy_takes_the_most_likely_token() -> None:
    logits = make_logits(3)
    states = [make_state(temperature=0.0), make_state(temperature=0.0, logprobs=1), make_state(top_k=1)]
    assert sample_ids(logits, *states) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [1, 7, 512, 640, 3000, 4096, 49152])
def test_greedy_takes_the_first_of_equals(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-3, 4, (5, vocab), generator=generator).bfloat16()
    states = [make_state(temperature=0.0) for _ in range(5)]
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample_ids(logits, *states) == expected


@pytest.mark.parametrize("vocab", [7, 3000, 49152])
def test_no_rows_give_no_tokens(vocab: int) -> None:
    assert make_sampler().sample(torch.empty(0, vocab), []) == []


@pytest.mark.parametrize(
    ("temperature", "filters"),
    [(0.5, {}), (2.0, {}), (1.0, {"top_k": 50}), (1.0, {"top_p": 0.9}), (0.5, {"min_p": 0.05})],
)
def test_draws_follow_the_tempered_distribution(temperature: float, filters: dict[str, Any]) -> None:
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, [10, 20, 30]] = torch.tensor([2.0, 1.0, 0.0])
    expected = (torch.tensor([2.0, 1.0, 0.0]) / temperature).softmax(-1)
    if filters.get("top_p") == 0.9:
        cumulative_before = expected.cumsum(0) - expected
        expected = torch.where(cumulative_before < 0.9, expected, 0.0)
        expected /= expected.sum()
    states = [make_state(temperature=temperature, seed=seed, **filters) for seed in range(1000)]
    ids = sample_ids(logits.expand(1000, -1), *states)
    shares = torch.tensor([ids.count(token_id) / 1000 for token_id in (10, 20, 30)])
    torch.testing.assert_close(shares, expected, atol=0.04, rtol=0)


def test_top_k_keeps_the_k_most_likely() -> None:
    logits = make_logits(scale=0.1)
    assert kept_tokens(logits, top_k=3) == set(logits[0].topk(3).indices.tolist())


@pytest.mark.parametrize("scale", [5.0, 0.01], ids=["few candidates", "flatter than the candidates"])
def test_top_p_keeps_the_fewest_tokens_that_reach_p(scale: float) -> None:
    logits = make_logits(scale=scale)
    probs, ids = logits[0].softmax(-1).sort(descending=True)
    nucleus = set(ids[(probs.cumsum(0) - probs) < 0.6].tolist())
    drawn = kept_tokens(logits, top_p=0.6)
    assert drawn <= nucleus
    assert len(drawn) > min(len(nucleus), 300) // 2


def test_min_p_drops_tokens_below_its_share_of_the_most_likely() -> None:
    logits = make_logits(scale=1.0)
    probs = logits[0].softmax(-1)
    allowed = set(torch.nonzero(probs >= 0.3 * probs.max())[:, 0].tolist())
    assert kept_tokens(logits, min_p=0.3) <= allowed


def test_a_token_depends_on_its_seed_and_position_and_not_on_the_batch() -> None:
    logits = make_logits(1, scale=0.5)
    alone = sample_ids(logits, make_state(seed=11))
    crowd = [make_state(seed=seed, top_p=0.9) for seed in range(5)]
    together = sample_ids(logits.expand(6, -1), *crowd, make_state(seed=11))
    assert together[-1:] == alone
    later = sample_ids(logits, make_state(seed=11, outputs=(8,)))
    other = sample_ids(logits, make_state(seed=12))
    assert len({alone[0], later[0], other[0]}) == 3


@pytest.mark.parametrize("row", [{"top_k": 2000, "top_p": 0.7}, {"top_p": 0.9}, {"top_k": 1500}])
def test_a_neighbour_that_needs_a_whole_row_changes_nothing(row: dict[str, Any]) -> None:
    logits = make_logits(60, scale=2.0).bfloat16()
    flat = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    states = [make_state(seed=seed, **row) for seed in range(60)]
    alone = [sample_ids(logits[i : i + 1], states[i])[0] for i in range(60)]
    together = sample_ids(torch.cat([logits, flat]), *states, make_state(top_p=0.99))
    assert together[:-1] == alone


def test_the_mass_of_a_wide_top_k_is_exact() -> None:
    logits = torch.zeros(1, VOCAB)  # uniform: half of the mass of any 2000 tokens is 1000 tokens
    assert len(kept_tokens(logits, 3000, top_k=2000, top_p=0.5)) <= 1000


def test_uniform_numbers_are_uniform_and_streams_differ() -> None:
    draws = np.array([[uniform_at(seed, index) for index in range(200)] for seed in range(-20, 20)])
    assert 0.0 <= draws.min() < draws.max() < 1.0
    assert abs(draws.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.03
    assert len(np.unique(draws)) == draws.size


def test_bias_moves_logits() -> None:
    logits = make_logits()
    assert sample_ids(logits, make_state(temperature=0.0, logit_bias={77: 100.0})) == [77]
    best = int(make_logits().argmax())
    assert sample_ids(make_logits(), make_state(temperature=0.0, logit_bias={best: -100.0})) != [best]


def test_penalties_follow_their_formulas() -> None:
    state = make_state(
        prompt=(5, 6),
        outputs=(7, 7, 8),
        temperature=0.0,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 6, 7, 8, 9]] = torch.tensor([4.0, -4.0, 4.0, -1.0, 4.0])
    penalise(logits, [state])
    expected = [4.0 / 2, -4.0 * 2, 4.0 / 2 - 0.5 - 2 * 0.25, -1.0 * 2 - 0.5 - 0.25, 4.0]
    assert logits[0, [5, 6, 7, 8, 9]].tolist() == expected


def test_end_tokens_are_impossible_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, END], logits[0, 9], logits[0, 4] = 50.0, 40.0, 30.0
    before = make_state(temperature=0.0, min_tokens=1, stop_token_ids=(9,))
    after = make_state(temperature=0.0, min_tokens=1, stop_token_ids=(9,), outputs=(4,))
    assert sample_ids(logits.clone(), before) == [4]
    assert sample_ids(logits.clone(), after) == [END]


def test_only_allowed_tokens_are_drawn() -> None:
    allowed = [7, 2999, 5, 7]
    assert kept_tokens(make_logits(scale=0.1), allowed_token_ids=allowed) == {5, 7, 2999}
    best = int(make_logits().argmax())
    assert sample_ids(make_logits(), make_state(temperature=0.0, allowed_token_ids=[best, 7])) == [best]
    assert sample_ids(make_logits(), make_state(temperature=0.0, allowed_token_ids=[7])) == [7]


def test_the_last_token_of_a_bad_word_does_not_follow_the_others() -> None:
    words = {"temperature": 0.0, "bad_words_token_ids": [(9,), (7, 8, 4)]}
    logits = torch.zeros(1, VOCAB)
    logits[0, 9], logits[0, 4], logits[0, 3] = 9.0, 4.0, 3.0

    def next_token(**state: Any) -> int:
        return sample_ids(logits.clone(), make_state(**words, **state))[0]

    assert next_token(outputs=(7, 8)) == 3
    for outputs in ((), (8,), (7, 8, 8), (8, 7)):
        assert next_token(outputs=outputs) == 4
    assert next_token(prompt=(5, 7), outputs=(8,)) == 4, (
        "a word that begins in the prompt is not the output's"
    )


@pytest.mark.parametrize(
    "nothing",
    [
        {"allowed_token_ids": [END], "min_tokens": 1},
        {"allowed_token_ids": [9], "bad_words_token_ids": [(9,)]},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_is_left_the_output_ends(nothing: dict[str, Any], temperature: float) -> None:
    states = [make_state(temperature=temperature, **nothing), make_state(temperature=0.0)]
    logits = make_logits(2)
    assert sample_ids(logits.clone(), *states) == [END, int(logits[1].argmax())]


TOKENS = st.integers(0, VOCAB - 1)
SHAPED = st.fixed_dictionaries(
    {
        "outputs": st.lists(st.integers(0, 9), max_size=6).map(tuple),
        "temperature": st.sampled_from([0.0, 0.7]),
        "seed": st.integers(0, 2**40),
    },
    optional={
        "logit_bias": st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=4),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(TOKENS, max_size=2),
        "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=40),
        "bad_words_token_ids": st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=3),
        "min_p": st.floats(0, 0.5),
        "top_p": st.floats(0.1, 1.0),
        "logprobs": st.integers(0, 3),
    },
)


def shaped(row: torch.Tensor, state: RequestState) -> list[float]:
    """The reference: one row, token by token, in float32 as the sampler."""
    sampling, tokens = state.sampling, state.tokens(0, state.num_tokens).tolist()
    outputs = tokens[state.num_prompt_tokens :]
    logits = [np.float32(value) for value in row.tolist()]
    for token_id, bias in (sampling.logit_bias or {}).items():
        logits[token_id] += np.float32(bias)
    penalty = np.float32(sampling.repetition_penalty)
    for token_id in set(tokens) if penalty != 1 else ():
        value = logits[token_id]
        logits[token_id] = value / penalty if value > 0 else value * penalty
    for token_id in set(outputs):
        count = np.float32(outputs.count(token_id))
        logits[token_id] -= count * np.float32(sampling.frequency_penalty) + np.float32(
            sampling.presence_penalty
        )
    excluded = {END, *(sampling.stop_token_ids or ())} if len(outputs) < sampling.min_tokens else set()
    for *before, last in sampling.bad_words_token_ids or ():
        if outputs[len(outputs) - len(before) :] == before:
            excluded.add(last)
    if sampling.allowed_token_ids is not None:
        excluded |= set(range(VOCAB)) - set(sampling.allowed_token_ids)
    for token_id in excluded:
        logits[token_id] = np.float32("-inf")
    if max(logits) == float("-inf"):
        logits[END] = np.float32(0)
    return [float(value) for value in logits]


@given(st.lists(SHAPED, min_size=1, max_size=5), st.integers(0, 1000))
@settings(max_examples=examples(24))
def test_rows_are_shaped_by_their_own_request_alone(rows: list[dict[str, Any]], seed: int) -> None:
    logits = make_logits(len(rows), seed)
    states = [make_state(**row) for row in rows]
    together = logits.clone()
    for shape in (add_biases, penalise):
        shape(together, states)
    exclude(together, states, [END])
    assert together.tolist() == [shaped(row, state) for row, state in zip(logits, states, strict=True)]
    sampled = make_sampler().sample(logits.clone(), states)
    alone = [make_sampler().sample(logits[i : i + 1].clone(), [states[i]])[0] for i in range(len(rows))]
    assert sampled == alone


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = make_logits()
    expected = logits[0].log_softmax(-1)
    state = make_state(temperature=0.1, top_k=5, logit_bias={77: 100.0}, logprobs=3)
    ((token_id, logprobs),) = make_sampler().sample(logits.clone(), [state])
    assert logprobs is not None
    assert token_id == 77
    assert logprobs.logprob == pytest.approx(float(expected[77]))
    assert logprobs.rank == 1 + int((logits[0] > logits[0, 77]).sum()) > 3
    values, ids = expected.topk(3)
    assert [i for i, _ in logprobs.top] == ids.tolist()
    assert [v for _, v in logprobs.top] == pytest.approx(values.tolist())


def test_logprobs_of_a_row_depend_on_no_other_row() -> None:
    """Which of equals are named too: logits in bfloat16 have many."""
    for seed in range(20):
        logits = make_logits(seed=seed).bfloat16()
        for count in (1, 2, 5):
            state, other = (make_state(temperature=0.0, logprobs=each) for each in (count, 20))
            alone = make_sampler().sample(logits.clone(), [state])
            beside = make_sampler().sample(logits.repeat(3, 1), [other, state, state])
            assert beside[1:] == alone * 2


def test_bfloat16_logits_sample_too() -> None:
    logits = make_logits(2).bfloat16()
    ids = sample_ids(logits, make_state(temperature=0.0), make_state(top_p=0.5))
    assert ids[0] == int(logits[0].argmax())


@pytest.mark.parametrize("temperature", [1e-300, 1e-6])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits = make_logits()
    assert sample_ids(logits.clone(), make_state(temperature=temperature)) == [int(logits.argmax())]


@pytest.mark.parametrize("size", [1, 300, 512, 1024, 49152, 128256])
def test_a_draw_falls_on_the_weight_that_its_share_is_in(size: int) -> None:
    """As one running sum of all weights says, but for rounding; never on a weight of 0."""
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(40, size, generator=generator) ** 8
    weights[:, : size // 3] = 0.0
    weights[torch.rand(40, size, generator=generator) < 0.7] = 0.0
    weights[:, size // 2] = 1e-30
    uniform = torch.rand(40, generator=generator, dtype=torch.float64)
    uniform[:4], uniform[4:8] = 0.0, 1.0 - 2.0**-53
    index = _invert_cdf(weights, uniform)
    assert (weights.gather(1, index[:, None]) > 0).all()
    cdf = weights.double().cumsum(-1)
    at = uniform[:, None] * cdf[:, -1:]
    slack = 1e-9 * cdf[:, -1:]
    found, before = cdf.gather(1, index[:, None]), cdf.gather(1, (index[:, None] - 1).clamp_(min=0))
    assert (found >= at - slack).all()
    assert ((before <= at + slack) | (index[:, None] == 0)).all()
