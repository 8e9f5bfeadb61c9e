from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest

from backfill.core.errors import ConfigError
from experiments.blendserve.mix import A100_LLAMA_3_8B, MixSpec, Usage, draw_mix
from experiments.blendserve.sources import SOURCES, SourceRequests
from experiments.blendserve.tables import source_figures


def spec(
    source: str = "azure", density: float = 1.0, sharing: float = 0.3, num: int = 3000, seed: int = 1
) -> MixSpec:
    return MixSpec(source, density, sharing, num, seed)


@pytest.mark.parametrize("source", [name for name, each in SOURCES.items() if each.paper is not None])
def test_sources_are_near_table_3(source: str) -> None:
    drawn, paper = source_figures(source), SOURCES[source].paper
    assert paper is not None
    assert drawn.sharing == pytest.approx(paper.sharing, abs=0.016)
    assert drawn.density == pytest.approx(paper.density, rel=0.25)


@pytest.mark.parametrize("source", ["burstgpt", "azure", "sharegpt", "wildchat"])
@pytest.mark.parametrize(("density", "sharing"), [(0.8, 0.45), (1.4, 0.25)])
def test_a_mix_has_the_density_and_the_sharing_asked_for(source: str, density: float, sharing: float) -> None:
    mix = draw_mix(spec(source, density, sharing, 10_000))
    assert mix.figures.density == pytest.approx(density, rel=0.01)
    assert mix.figures.sharing == pytest.approx(sharing, abs=0.002)
    assert len(mix) == pytest.approx(10_000, rel=0.3)  # one video more or less is many chats


def test_a_source_that_shares_more_than_asked_for_is_mixed_with_videos_alone() -> None:
    mix = draw_mix(spec("wildchat", 1.0, 0.05, 10_000))
    assert set(mix.parts) == {"wildchat", "openvid"}
    assert mix.figures.density == pytest.approx(1.0, rel=0.01)
    assert mix.figures.sharing > 0.15


def test_usage_is_the_sum_of_the_formula_over_the_requests() -> None:
    requests = SourceRequests(16, np.array([0, 1, 0]), np.array([5, 7, 9]), np.array([2, 3, 4]))
    assert requests.shared_tokens.tolist() == [0, 0, 16]
    model = A100_LLAMA_3_8B
    usage = Usage.of(requests)
    assert usage.tokens == 3 * 16 + 5 + 7 + 9 + 2 + 3 + 4
    assert usage.shared_tokens == 16
    of_each = [model.compute_s(21, 2), model.compute_s(23, 3), model.compute_s(25, 4, 16)]
    assert usage.compute_s == pytest.approx(sum(of_each))
    of_each = [model.memory_s(21, 2), model.memory_s(23, 3), model.memory_s(25, 4)]
    assert usage.memory_s == pytest.approx(sum(of_each))


def test_prompts_share_their_prefixes_and_nothing_else() -> None:
    mix = draw_mix(spec(num=1000))
    requests, outputs = mix.requests()
    assert len(requests) == len(outputs) == len(mix)
    assert [each.request_id for each in requests] == list(range(len(requests)))
    begins = 0
    for name, part in mix.parts.items():
        seen: dict[int, bytes] = {}
        own = set()
        for index, length in enumerate(part.prompt_tokens):
            prompt = requests[begins + index].prompt_token_ids
            assert isinstance(prompt, array) and len(prompt) == length
            prefix = prompt[: part.prefix_tokens].tobytes()
            assert seen.setdefault(int(part.prefixes[index]), prefix) == prefix
            own.add(prompt[part.prefix_tokens : part.prefix_tokens + 2].tobytes())
            known = requests[begins + index].known_output_tokens
            assert (known == outputs[begins + index]) if name == "openvid" else known is None
            assert requests[begins + index].max_output_tokens >= outputs[begins + index]
        assert len(set(seen.values())) == len(seen)
        assert len(own) > 0.99 * len(part)
        begins += len(part)


def test_a_seed_draws_the_same_pool_and_another_one_another() -> None:
    first, again, other = (draw_mix(spec(seed=seed)) for seed in (1, 1, 2))
    assert first.figures == again.figures
    assert first.parts["azure"].own_tokens.tolist() == again.parts["azure"].own_tokens.tolist()
    assert first.parts["azure"].own_tokens.tolist() != other.parts["azure"].own_tokens.tolist()


def test_lengths_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("ContextTokens,GeneratedTokens\n1000,20\n2000,30\n")
    mix = draw_mix(spec(num=500)._replace(lengths=path))
    lengths = {
        (int(own), int(output))
        for own, output in zip(mix.parts["azure"].own_tokens, mix.parts["azure"].output_tokens, strict=True)
    }
    assert lengths == {(1000, 20), (2000, 30)}
    assert mix.figures.density == pytest.approx(1.0, rel=0.02)


def test_too_few_requests_and_impossible_densities_are_refused() -> None:
    with pytest.raises(ConfigError, match="10 requests of burstgpt make no mix"):
        draw_mix(spec("burstgpt", num=10))
    with pytest.raises(ConfigError, match="make no mix"):
        draw_mix(spec("sharegpt", density=50.0))


def test_a_file_without_a_request_that_fits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("ContextTokens,GeneratedTokens\n1000,2000000\n")
    with pytest.raises(ConfigError, match=r"lengths\.csv: no request has 65536 tokens"):
        draw_mix(spec()._replace(lengths=path))
